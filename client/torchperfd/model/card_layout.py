"""The layouts of the verdict card: for a terminal, and as HTML.

The HTML is one element, styled in place, on whatever background the notebook has.
"""

import textwrap
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Final

from torchperfd.model.terminal_text import paint

if TYPE_CHECKING:
    from torchperfd.model.card import CauseCard, VerdictCard


_INDENT: Final = 8
"""Columns of a part's name and the space around it."""


def card_text(card: "VerdictCard", *, colour: bool, width: int) -> str:
    """Return the card, without a last newline. Lines are wrapped at words; nothing is cut."""
    return "\n".join(_text_lines(card, colour=colour, width=width))


def _text_part(name: str, words: str, *, colour: bool, width: int) -> list[str]:
    """Return a part of a card, its name in front of the first line."""
    wrapped = textwrap.wrap(
        words, max(20, width - _INDENT), break_long_words=False, break_on_hyphens=False
    ) or [""]
    first, *rest = wrapped
    lead = paint(f"  {name:<{_INDENT - 2}}", "dim", colour=colour)
    return [f"{lead}{first}".rstrip(), *(" " * _INDENT + line for line in rest)]


def _text_lines(card: "VerdictCard", *, colour: bool, width: int) -> Iterator[str]:
    if card.note:
        yield from _text_part("note", card.note, colour=colour, width=width)
    if card.failure:
        yield paint("✗ FAILED", "bad", colour=colour)
        yield from _text_part("why", card.failure, colour=colour, width=width)
        if card.remedy:
            yield from _text_part("fix", card.remedy, colour=colour, width=width)
        if card.remark:
            yield from _text_part("steps", card.remark, colour=colour, width=width)
    elif not card.causes:
        mark, style = ("✓", "good") if card.is_healthy else ("?", "warn")
        yield from _text_head(
            f"{mark} {card.state.upper()}", card.heading[len(card.state) :], style, colour=colour, width=width
        )
        yield from _text_part("why", card.remark, colour=colour, width=width)
    for position, cause in enumerate(card.causes):
        yield from _text_cause(cause, is_first=not position and not card.failure, colour=colour, width=width)
    for at, words in enumerate(card.account_lines):
        yield from _text_part("" if at else "step", words, colour=colour, width=width)
    for words in card.also:
        yield from _text_part("also", words, colour=colour, width=width)
    if card.outcome:
        yield from _text_part("done", card.outcome, colour=colour, width=width)
    if card.trace:
        yield from _text_part("trace", card.trace, colour=colour, width=width)
    if card.next_command:
        yield from _text_part("next", card.next_command, colour=colour, width=width)


def _text_cause(cause: "CauseCard", *, is_first: bool, colour: bool, width: int) -> Iterator[str]:
    mark, style = ("✗", "bad") if is_first else ("!", "warn")
    name = f"{mark} {cause.cause.upper()}"
    rest = "".join(f" · {word}" for word in (cause.where, cause.cost) if word)
    yield from _text_head(name, rest, style, colour=colour, width=width)
    for name, words in cause.parts:
        yield from _text_part(name, words, colour=colour, width=width)


def _text_head(name: str, words: str, style: str, *, colour: bool, width: int) -> Iterator[str]:
    first, *rest = textwrap.wrap(
        f"{name}{words}",
        width,
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    yield paint(name, style, colour=colour) + first[len(name) :]
    yield from rest


# In place, since notebooks and mail drop <style>. The tints are readable on light and on dark.
_RED: Final = "rgba(217,48,37,.9)"
_AMBER: Final = "rgba(200,130,0,.9)"
_GREEN: Final = "rgba(24,128,56,.9)"
_CARD: Final = "font:13px/1.5 system-ui,sans-serif;color:inherit;max-width:80ch;margin:4px 0"
_CAUSE: Final = "border-left:4px solid {};padding:2px 0 2px 10px;margin:6px 0"
_HEAD: Final = "font-weight:600"
_NAME: Final = "display:inline-block;min-width:4em;opacity:.75"
_CODE: Final = "font:12px/1.5 ui-monospace,monospace"


def card_html(card: "VerdictCard") -> str:
    """Return the card, ending in a newline."""
    return "\n".join(_html_lines(card)) + "\n"


def _html_lines(card: "VerdictCard") -> Iterator[str]:
    yield f'<div style="{_CARD}">'
    if card.note:
        yield _html_part("note", card.note, is_code=False)
    if card.failure:
        yield f'<div style="{_CAUSE.format(_RED)}"><div style="{_HEAD}">✗ failed</div>'
        yield f"<div>{escape(card.failure)}</div>"
        if card.remedy:
            yield _html_part("fix", card.remedy, is_code=True)
        if card.remark:
            yield f"<div>{escape(card.remark)}</div>"
        yield "</div>"
    elif not card.causes:
        mark, colour = ("✓", _GREEN) if card.is_healthy else ("?", _AMBER)
        yield f'<div style="{_CAUSE.format(colour)}"><div style="{_HEAD}">{mark} {escape(card.heading)}</div>'
        yield f"<div>{escape(card.remark)}</div></div>"
    for position, cause in enumerate(card.causes):
        yield from _html_cause(cause, is_first=not position and not card.failure)
    for at, words in enumerate(card.account_lines):
        yield _html_part("" if at else "step", words, is_code=False)
    for words in card.also:
        yield _html_part("also", words, is_code=False)
    if card.outcome:
        yield _html_part("done", card.outcome, is_code=False)
    if card.trace:
        yield _html_part("trace", card.trace, is_code=False)
    if card.next_command:
        yield _html_part("next", card.next_command, is_code=True)
    yield "</div>"


def _html_cause(cause: "CauseCard", *, is_first: bool) -> Iterator[str]:
    mark, colour = ("✗", _RED) if is_first else ("!", _AMBER)
    yield f'<div style="{_CAUSE.format(colour)}"><div style="{_HEAD}">{mark} {escape(cause.heading)}</div>'
    for name, words in cause.parts:
        yield _html_part(name, words, is_code=name == "fix")
    yield "</div>"


def _html_part(name: str, words: str, *, is_code: bool) -> str:
    inner = f'<code style="{_CODE}">{escape(words)}</code>' if is_code else escape(words)
    return f'<div><span style="{_NAME}">{name}</span>{inner}</div>'
