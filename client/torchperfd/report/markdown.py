"""The phase table as GitHub-flavoured Markdown."""

import re
from html import escape as entities

from torchperfd.report.numbers import Table
from torchperfd.report.words import HEADINGS, cells, title

_SPECIAL = re.compile(r"([\\`*_{}\[\]|~])")


def render(table: Table) -> str:
    """Return the table, ending in a newline."""
    lines = [f"**{escape(title(table))}**", ""]
    if table.rows:
        lines += [_line(HEADINGS), "|---|---|" + "---:|" * (len(HEADINGS) - 2)]
        group = ""
        for row in table.rows:
            phase, action, *numbers = cells(row)
            lines.append(_line(["" if phase == group else phase, escape(action), *numbers]))
            group = phase
        lines.append("")
    lines += [f"- {escape(note)}" for note in table.notes]
    return "\n".join(lines).rstrip("\n") + "\n"


def escape(word: str) -> str:
    """Return a word that means nothing but itself."""
    return _SPECIAL.sub(r"\\\1", entities(word, quote=False))


def _line(words: "tuple[str, ...] | list[str]") -> str:
    return "| " + " | ".join(words) + " |"
