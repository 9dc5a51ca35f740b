"""HTML pages that need no server, no network and no other file.

Style and script are in the page; its Content-Security-Policy allows only their hashes. Its data is in a block
that no browser executes, and the script shows it as text.
"""

import base64
import hashlib
import json
import re
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, Final, Literal

PageKind = Literal["capture", "comparison", "run", "run_comparison"]
"""What a page shows: each kind has a script of that name beside this file."""

_HERE: Final = Path(__file__).resolve().parent
# The style and the modules that the live page has as well.
_SHARED: Final = _HERE.parent / "web" / "assets"
_IMPORT: Final = re.compile(r'^import \{([^}]*)\} from "(\.[\w./]+)";$', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export ((?:async )?function|class|const) (\w+)", re.MULTILINE)

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
    style, script = "\n" + _read(_SHARED / "kit.css") + _read(_HERE / "page.css"), _script(kind)
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


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _script(kind: PageKind) -> str:
    """Return a page's script and all that it imports as one script: a browser loads no module from a file."""
    modules: dict[Path, str] = {}
    _gather(_HERE / f"{kind}.js", modules)
    return "\n".join(['\n"use strict";', "const modules = {};", *modules.values(), ""])


def _gather(path: Path, modules: dict[Path, str]) -> None:
    """Add a module after those that it imports: each is a function that returns what the module exports."""
    source = _read(path)
    for found in _IMPORT.finditer(source):
        imported = (path.parent / found[2]).resolve()
        if imported not in modules:
            _gather(imported, modules)
    body = _IMPORT.sub(lambda found: f'const {{{found[1]}}} = modules["{Path(found[2]).name}"];', source)
    names = ", ".join(found[2] for found in _EXPORT.finditer(source))
    body = _EXPORT.sub(r"\1 \2", body)
    modules[path] = f'modules["{path.name}"] = (() => {{\n{body}return {{ {names} }};\n}})();'


def _hash(text: str) -> str:
    """Return the source expression of a Content-Security-Policy that allows just this element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
