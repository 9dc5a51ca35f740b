"""Renders the advice as text for people, and as dictionaries for programs."""

import textwrap
from collections.abc import Sequence
from typing import IO, Any, Final

from rich.text import Text

from torchperfd.durations import ns_text
from torchperfd_daemon.analysis.advice.item import Advice
from torchperfd_daemon.analysis.layout import PLAIN_WIDTH, console_for, printable
from torchperfd_daemon.text import ranks_phrase

_INDENT: Final = 3


def advice_to_dict(advice: Sequence[Advice]) -> list[dict[str, Any]]:
    """Return the ``advice`` of the ``torchperfd.analysis/1`` document; times in µs."""
    return [
        {
            "rule": each.rule,
            "ranks": list(each.ranks),
            "evidence": each.evidence,
            "saves_us_per_step": each.saves_ns_per_step / 1000,
            "margin_us_per_step": each.margin_ns / 1000,
            "per": each.per,
            "share_of_step": each.share_of_step,
            "change": each.change,
            "setting": each.setting,
        }
        for each in advice
    ]


def render_advice(advice: Sequence[Advice], out: IO[str], of: int = 0) -> None:
    """Write the changes to ``out``, most time saved first; nothing without advice.

    Args:
        of: The number of all ranks; 0 if it is unknown.
    """
    if not advice:
        return
    console = console_for(out)
    width = console.width if out.isatty() else PLAIN_WIDTH
    console.print(Text("Advice", style="bold"))
    for number, each in enumerate(advice, 1):
        first = f"{number}. {printable(each.change)}: {_saves(each, of)}"
        console.print(_indented(first, width, outdent=_INDENT))
        console.print(_indented(printable(each.evidence), width))
        console.print(Text(_indented(printable(each.setting), width), style="bold"))


def _indented(text: str, width: int, outdent: int = 0) -> str:
    """Return the text in lines of at most ``width``, all but an outdented first one indented."""
    inner, first = " " * _INDENT, " " * (_INDENT - outdent)
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=inner, break_on_hyphens=False)


def _saves(advice: Advice, of: int) -> str:
    on = f", on {ranks_phrase(sorted(advice.ranks), of)}" if advice.ranks else ""
    if not advice.saves_ns_per_step:
        return f"a risk, no time{on}"
    least, most = (advice.saves_ns_per_step + side * advice.margin_ns for side in (-1, 1))
    saved = f"{ns_text(least)} to {ns_text(most)}" if advice.margin_ns else ns_text(least)
    return f"saves {saved} {advice.per_what} ({advice.share_of_step:.0%}){on}"
