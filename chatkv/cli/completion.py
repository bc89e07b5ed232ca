"""`chatkv completion`: the script by which a shell completes commands, options, ids and models."""

from __future__ import annotations

import click

COMPLETE_VARIABLE = "_CHATKV_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash  eval "$(chatkv completion bash)", in ~/.bashrc
    zsh   eval "$(chatkv completion zsh)", in ~/.zshrc, after compinit
    fish  chatkv completion fish > ~/.config/fish/completions/chatkv.fish
    """
    from click.shell_completion import get_completion_class

    from chatkv.cli.main import cli

    found = get_completion_class(shell)
    assert found is not None  # click knows these three
    # The template itself: `source()` would ask the shell for its version, and bash for one of 4.4.
    script = found(cli, {}, "chatkv", COMPLETE_VARIABLE)
    click.echo(script.source_template % script.source_vars(), nl=False)
