"""The verdict card for a terminal: the cause first, then why, fix, gain and where to read more."""

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from torchperfd.card.ansi import paint

if TYPE_CHECKING:
    from torchperfd.card.contents import CauseCard, VerdictCard

_INDENT: Final = 8
"""Columns of a part's name and the space around it."""


def render(card: "VerdictCard", *, colour: bool, width: int) -> str:
    """Return the card, without a last newline. Lines are wrapped at words; nothing is cut."""
    return "\n".join(_lines(card, colour=colour, width=width))


def part(name: str, words: str, *, colour: bool, width: int) -> list[str]:
    """Return a part of a card, its name in front of the first line."""
    wrapped = textwrap.wrap(
        words, max(20, width - _INDENT), break_long_words=False, break_on_hyphens=False
    ) or [""]
    first, *rest = wrapped
    lead = paint(f"  {name:<{_INDENT - 2}}", "dim", colour=colour)
    return [f"{lead}{first}".rstrip(), *(" " * _INDENT + line for line in rest)]


def _lines(card: "VerdictCard", *, colour: bool, width: int) -> Iterator[str]:
    if card.note:
        yield from part("note", card.note, colour=colour, width=width)
    if card.failure:
        yield paint("✗ FAILED", "bad", colour=colour)
        yield from part("why", card.failure, colour=colour, width=width)
        if card.remedy:
            yield from part("fix", card.remedy, colour=colour, width=width)
        if card.remark:
            yield from part("steps", card.remark, colour=colour, width=width)
    elif not card.causes:
        mark, style = ("✓", "good") if card.is_healthy else ("?", "warn")
        yield from _head(
            f"{mark} {card.state.upper()}", card.heading[len(card.state) :], style, colour=colour, width=width
        )
        yield from part("why", card.remark, colour=colour, width=width)
    for position, cause in enumerate(card.causes):
        yield from _cause(cause, is_first=not position and not card.failure, colour=colour, width=width)
    for at, words in enumerate(card.account_lines):
        yield from part("" if at else "step", words, colour=colour, width=width)
    for words in card.also:
        yield from part("also", words, colour=colour, width=width)
    if card.outcome:
        yield from part("done", card.outcome, colour=colour, width=width)
    if card.trace:
        yield from part("trace", card.trace, colour=colour, width=width)
    if card.next_command:
        yield from part("next", card.next_command, colour=colour, width=width)


def _cause(cause: "CauseCard", *, is_first: bool, colour: bool, width: int) -> Iterator[str]:
    mark, style = ("✗", "bad") if is_first else ("!", "warn")
    name = f"{mark} {cause.cause.upper()}"
    rest = "".join(f" · {word}" for word in (cause.where, cause.cost) if word)
    yield from _head(name, rest, style, colour=colour, width=width)
    for name, words in cause.parts:
        yield from part(name, words, colour=colour, width=width)


def _head(name: str, words: str, style: str, *, colour: bool, width: int) -> Iterator[str]:
    first, *rest = textwrap.wrap(
        f"{name}{words}",
        width,
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    yield paint(name, style, colour=colour) + first[len(name) :]
    yield from rest
