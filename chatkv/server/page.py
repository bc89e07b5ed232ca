"""The server's own chat page: files of this package, and nothing from anywhere else.

Its policy lets a browser load and ask this server alone, and run no script that is not a file of
it, so that whatever a model writes stays text.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

FILES = Path(__file__).parent / "static"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
    ".txt": "text/plain; charset=utf-8",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",  # the one that cleans what Markdown becomes
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-cache",  # asked for again, and answered with 304 where nothing is new
}


@dataclass(frozen=True)
class File:
    content: bytes
    media_type: str
    etag: str


@cache
def files() -> dict[str, File]:
    """All files by their names below the page's folder: a name that is not among them leads
    nowhere."""
    found = {}
    for path in FILES.rglob("*"):
        if path.is_file() and path.suffix in MEDIA_TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            name = path.relative_to(FILES).as_posix()
            found[name] = File(content, MEDIA_TYPES[path.suffix], etag)
    return found


def routes() -> list[Route]:
    return [Route("/", root), Route("/page/{name:path}", file)]


async def root(request: Request) -> Response:
    """The chat page for browsers; for programs, that something is here."""
    if "text/html" in request.headers.get("accept", ""):
        return _answer(request, files()["index.html"])
    return PlainTextResponse("chatkv is running")


async def file(request: Request) -> Response:
    """A file of the chat page."""
    found = files().get(request.path_params["name"])
    if found is None:
        raise HTTPException(404)
    return _answer(request, found)


def _answer(request: Request, found: File) -> Response:
    headers = {**HEADERS, "ETag": found.etag, "Vary": "Accept"}
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)
