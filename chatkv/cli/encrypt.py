"""`chatkv encrypt`: keep the KV cache encrypted, or no longer."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import click

from chatkv.cli.output import Output, output_options
from chatkv.errors import UsageError
from chatkv.paths import folders

WORDS_ARE_PLAIN = (
    "conversations themselves are not encrypted by this: keep the data folder on an encrypted disk"
)
YES = click.option("-y", "--yes", is_flag=True, help="Do not ask.")


@click.group()
def encrypt() -> None:
    """Keep the KV cache encrypted (AES-GCM), or no longer.

    KV holds what was said in another form. The passphrase is read from the file that
    CHATKV_KEY_FILE names, else from the system's keyring. Conversations themselves are not
    encrypted by this.
    """


@encrypt.command()
@output_options
def status(output: Output) -> None:
    """Say whether the KV cache is encrypted, and whether it can be opened."""
    from chatkv.cli.stores import open_blocks
    from chatkv_store.errors import StoreLocked

    is_encrypted, locked = False, ""
    try:
        blocks = open_blocks()
        if blocks is not None:
            is_encrypted = blocks.env.sealer is not None
            blocks.close()
    except StoreLocked as error:
        is_encrypted, locked = True, str(error)
    if not output.is_human:
        output.record({"kv": is_encrypted, "conversations": False, "locked": locked or None})
        return
    output.fields(
        [
            ("KV cache", ("encrypted" if is_encrypted else "not encrypted")),
            ("conversations", "not encrypted"),
            ("locked", locked),
        ]
    )


@encrypt.command()
@YES
def on(yes: bool) -> None:
    """Empty the KV cache, and keep it encrypted from now on.

    Without CHATKV_KEY_FILE asks for a passphrase and leaves it with the system's keyring (needs
    the package keyring).
    """
    from chatkv.client import engine
    from chatkv_store.encryption import find_passphrase, start_empty

    passphrase = find_passphrase()
    if passphrase is None:
        passphrase = _asked()
        _agree(yes)
        _leave_with_keyring(passphrase)
    else:
        _agree(yes)
    engine.make_way(folders())
    start_empty(folders().make().kv, passphrase)
    click.echo("the KV cache is encrypted from now on, and empty", err=True)
    click.echo(WORDS_ARE_PLAIN, err=True)


@encrypt.command()
@YES
def off(yes: bool) -> None:
    """Empty the KV cache, and keep it unencrypted from now on."""
    from chatkv.client import engine
    from chatkv_store.encryption import start_empty

    _agree(yes)
    engine.make_way(folders())
    start_empty(folders().make().kv, None)
    click.echo("the KV cache is not encrypted any more, and empty", err=True)


def _asked() -> bytes:
    """A new passphrase, where there is a keyring to leave it with and somebody to ask."""
    from chatkv_store.encryption import KEY_FILE_VARIABLE

    if sys.stdin.isatty() and find_spec("keyring") is not None:
        said: str = click.prompt("Passphrase", hide_input=True, confirmation_prompt=True, err=True)
        return said.encode()
    raise UsageError(
        f"no passphrase: write one into a file of your own and let {KEY_FILE_VARIABLE} name it"
    )


def _leave_with_keyring(passphrase: bytes) -> None:
    """UsageError where it is not found there afterwards: some keyrings keep nothing."""
    import keyring  # type: ignore[import-not-found, unused-ignore]

    from chatkv_store.encryption import (
        KEY_FILE_VARIABLE,
        KEYRING_SERVICE,
        KEYRING_USER,
        find_passphrase,
    )

    why = ""
    try:
        keyring.set_password(KEYRING_SERVICE, KEYRING_USER, passphrase.decode())
    except Exception as error:  # a keyring that is locked or absent has errors of its own kinds
        why = f" ({str(error).split('. ')[0]})"
    if find_passphrase() != passphrase:
        raise UsageError(
            f"the system's keyring does not keep the passphrase{why}: write it into a file of your "
            f"own and let {KEY_FILE_VARIABLE} name it"
        )


def _agree(yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("this empties the KV cache; without a terminal to ask at: add -y")
    if not click.confirm("This empties the KV cache (no word is lost). Go on?", err=True):
        raise SystemExit(1)
