"""HTML pages that need no server, no network and no other file.

Style and script are in the page; its Content-Security-Policy allows only their hashes. Its data is in a block
that no browser executes, and the script shows it as text.
"""

import base64
import hashlib
import json
from html import escape
from pathlib import Path
from typing import Any, Final, Literal

PageKind = Literal["capture", "comparison", "run", "run_comparison"]
"""What a page shows: each kind has a script of that name beside this file."""

_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript>This page draws itself with its own script, which is switched off.</noscript>
<main id="report"></main>
<script type="application/json" id="document">{document}</script>
<script>{script}</script>
</body>
</html>
"""


def render_page(kind: PageKind, title: str, document: dict[str, Any]) -> str:
    """Return a page.

    Args:
        kind: Which script draws it.
        title: Its title, to which the project's name is added.
        document: What that script shows; it must be JSON.
    """
    style, script = _asset("page.css"), _asset("common.js") + _asset(f"{kind}.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return _PAGE.format(
        policy=policy,
        title=escape(f"{title} · torchperfd"),
        style=style,
        script=script,
        document=_inert(document),
    )


def _inert(document: dict[str, Any]) -> str:
    """Return JSON that opens and ends no element, whatever names it holds: ASCII without "<"."""
    return json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return "\n" + Path(__file__).with_name(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the source expression of a Content-Security-Policy that allows just this element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
