"""Where other programs' clients are served, and which of them. Needs nothing but the standard
library, so that a wrong option is refused at once."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

from chatkv.errors import UsageError

# Pages of this machine, and the programs that are pages inside.
_OWN_ORIGIN = re.compile(
    r"(https?://(localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\]|tauri\.localhost)(:\d+)?"
    r"|(app|file|tauri|vscode-webview|vscode-file)://[^\s]*)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Access:
    """Who may come. `tokens` empty: whoever reaches the address. "*" in `hosts` or `origins` allows
    every one; else these are allowed beside this machine's own."""

    tokens: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def allows_host(self, host: str) -> bool:
        name = host_name(host)
        if not name or "*" in self.hosts or name in self.hosts:
            return True  # HTTP/1.0 sends none, and no browser does so
        if name == "localhost" or name.endswith(".localhost"):
            return True
        try:  # a rebound page has a name, never an address
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or address.is_private or address.is_unspecified

    def allows_origin(self, origin: str, host: str) -> bool:
        return self.trusts_origin(origin, host) or bool(_OWN_ORIGIN.fullmatch(origin))

    def trusts_origin(self, origin: str, host: str) -> bool:
        """Whether a page may see and delete conversations: the server's own, and those named."""
        same = origin.partition("://")[2] == host and bool(host)
        return same or "*" in self.origins or origin in self.origins

    def owner_of(self, headers: Mapping[str, str]) -> str | None:
        """Whose request it is: "" where no token is asked for, None where a wrong one was given.

        Every token is compared in constant time.
        """
        if not self.tokens:
            return ""
        kind, _, value = headers.get("authorization", "").partition(" ")
        given = [value.strip() if kind.lower() == "bearer" else "", headers.get("x-api-key", "")]
        found = None
        for token in self.tokens:
            for one in given:
                if hmac.compare_digest(_digest(one), _digest(token)):
                    found = token
        return None if found is None else owner_name(found)


def owner_name(token: str) -> str:
    """How a token's sessions are marked; the token cannot be told from it."""
    return hashlib.sha256(b"chatkv owner\0" + token.encode()).hexdigest()


def host_name(host: str) -> str:
    """A Host header's name or address, in lower case, less the port and its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if ":" in host else host.lower().rstrip(".")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()


@dataclass(frozen=True)
class Tls:
    """Files in PEM form: the certificate with those that vouch for it, and its key."""

    cert_file: str
    key_file: str

    def check(self) -> None:
        """Raises UsageError for files that cannot be used."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.cert_file, self.key_file)
        except OSError as error:
            said = error.strerror or error
            raise UsageError(f"--tls-cert {self.cert_file}, --tls-key: {said}") from None


@dataclass(frozen=True)
class Listen:
    """Where and for whom. `models` as --model takes them, None: the embedded one. prefill_url: a
    prefill worker that computes long prompts, asked with prefill_token."""

    host: str = "127.0.0.1"
    port: int = 11535
    access: Access = Access()
    models: tuple[str | None, ...] = (None,)
    tls: Tls | None = None
    prefill_url: str | None = None
    prefill_token: str | None = None
