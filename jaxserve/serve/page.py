"""The page at /: one static file that loads nothing from elsewhere."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources

from starlette.responses import HTMLResponse


def page_response() -> HTMLResponse:
    """The page, under a policy that runs its own script and style and nothing else."""
    text, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)


@functools.cache
def _page() -> tuple[str, str]:
    text = resources.files("jaxserve.serve").joinpath("page.html").read_text(encoding="utf-8")
    sources = {tag: _hashes(text, tag) for tag in ("script", "style")}
    policy = (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return text, policy


def _hashes(text: str, tag: str) -> str:
    """Source expressions of the inline elements; a browser hashes what stands between the tags."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = (hashlib.sha256(content.encode()).digest() for content in found)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
