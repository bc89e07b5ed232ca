"""`chatkv cache export` and `import`: a conversation with its KV as one file."""

from __future__ import annotations

from pathlib import Path

import click

from chatkv.cli.output import Output, count, output_options, plural, printable, size
from chatkv.cli.stores import complete_session, open_blocks, open_conversations, open_to_add
from chatkv.errors import UsageError

TEXT_ONLY = click.option("--text-only", is_flag=True, help="The conversation without its KV.")


@click.command()
@click.argument("session", shell_complete=complete_session, metavar="SESSION")
@click.option(
    "-o",
    "--output-file",
    "file",
    required=True,
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write it.",
)
@TEXT_ONLY
@click.option("-f", "--force", is_flag=True, help="Overwrite FILE.")
@output_options
def export(output: Output, session: str, file: Path, text_only: bool, force: bool) -> None:
    """Write a conversation, with its KV, to one file.

    The file holds every word of the conversation, readable to whoever has it.
    """
    from chatkv_store.transfer import export_session

    if file.exists() and not force:
        raise UsageError(f"{file} exists: take another name, or add -f")
    with open_conversations() as store:
        found = store.get_session(session)
        blocks = None if text_only else open_blocks()
        try:
            done = export_session(store, blocks, found, file)
        finally:
            if blocks is not None:
                blocks.close()
    if output.is_human:
        tokens = f"KV of {count(done.num_tokens)} of {plural(found.num_tokens, 'token')}"
        output.note(f"{file}: {'text' if text_only else tokens}, {size(done.file_bytes)}")
    else:
        output.record(
            {
                "session": found.id,
                "file": str(file),
                "bytes": done.file_bytes,
                "blocks": done.num_blocks,
                "stored_tokens": done.num_tokens,
                "tokens": found.num_tokens,
            }
        )


@click.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@TEXT_ONLY
@output_options
def import_(output: Output, file: Path, text_only: bool) -> None:
    """Take a conversation from a file that `export` wrote.

    Everything in it is verified before anything is stored. Whether its KV was computed by the
    model that it names cannot be: take files from people you trust, or the text alone.
    """
    from chatkv_store.transfer import import_session

    with open_conversations() as store:
        blocks = None if text_only else open_to_add(store)
        try:
            done = import_session(store, blocks, file)
        finally:
            if blocks is not None:
                blocks.close()
    session = done.session
    if not output.is_human:
        output.record(
            {
                "session": session.id,
                "title": session.title,
                "renamed": done.is_renamed,
                "turns": session.num_turns,
                "tokens": session.num_tokens,
                "blocks": 0 if text_only else done.num_blocks,
                "written_blocks": done.written_blocks,
                "refusal": done.refusal,
            }
        )
        return
    click.echo(session.id)
    kv = "" if text_only else f", {plural(done.num_blocks, 'block')} of KV"
    output.note(f'"{printable(session.title)}": {plural(session.num_turns, "turn")}{kv}')
    if done.is_renamed:
        output.note("its id was taken here, so it has a new one")
    if done.refusal:
        output.note(f"not all of its KV was stored: {done.refusal}")
