"""The verdict card as HTML: one element, styled in place, on whatever background the notebook has."""

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torchperfd.card.contents import CauseCard, VerdictCard

# In place, since notebooks and mail drop <style>. The tints are readable on light and on dark.
_RED: Final = "rgba(217,48,37,.9)"
_AMBER: Final = "rgba(200,130,0,.9)"
_GREEN: Final = "rgba(24,128,56,.9)"
_CARD: Final = "font:13px/1.5 system-ui,sans-serif;color:inherit;max-width:80ch;margin:4px 0"
_CAUSE: Final = "border-left:4px solid {};padding:2px 0 2px 10px;margin:6px 0"
_HEAD: Final = "font-weight:600"
_NAME: Final = "display:inline-block;min-width:4em;opacity:.75"
_CODE: Final = "font:12px/1.5 ui-monospace,monospace"


def render(card: "VerdictCard") -> str:
    """Return the card, ending in a newline."""
    return "\n".join(_lines(card)) + "\n"


def _lines(card: "VerdictCard") -> Iterator[str]:
    yield f'<div style="{_CARD}">'
    if card.note:
        yield _part("note", card.note, is_code=False)
    if card.failure:
        yield f'<div style="{_CAUSE.format(_RED)}"><div style="{_HEAD}">✗ failed</div>'
        yield f"<div>{escape(card.failure)}</div>"
        if card.remedy:
            yield _part("fix", card.remedy, is_code=True)
        if card.remark:
            yield f"<div>{escape(card.remark)}</div>"
        yield "</div>"
    elif not card.causes:
        mark, colour = ("✓", _GREEN) if card.is_healthy else ("?", _AMBER)
        yield f'<div style="{_CAUSE.format(colour)}"><div style="{_HEAD}">{mark} {escape(card.heading)}</div>'
        yield f"<div>{escape(card.remark)}</div></div>"
    for position, cause in enumerate(card.causes):
        yield from _cause(cause, is_first=not position and not card.failure)
    for at, words in enumerate(card.account_lines):
        yield _part("" if at else "step", words, is_code=False)
    for words in card.also:
        yield _part("also", words, is_code=False)
    if card.outcome:
        yield _part("done", card.outcome, is_code=False)
    if card.trace:
        yield _part("trace", card.trace, is_code=False)
    if card.next_command:
        yield _part("next", card.next_command, is_code=True)
    yield "</div>"


def _cause(cause: "CauseCard", *, is_first: bool) -> Iterator[str]:
    mark, colour = ("✗", _RED) if is_first else ("!", _AMBER)
    yield f'<div style="{_CAUSE.format(colour)}"><div style="{_HEAD}">{mark} {escape(cause.heading)}</div>'
    for name, words in cause.parts:
        yield _part(name, words, is_code=name == "fix")
    yield "</div>"


def _part(name: str, words: str, *, is_code: bool) -> str:
    inner = f'<code style="{_CODE}">{escape(words)}</code>' if is_code else escape(words)
    return f'<div><span style="{_NAME}">{name}</span>{inner}</div>'
