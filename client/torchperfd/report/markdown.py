"""The phase table as GitHub-flavoured Markdown."""

import re
from html import escape as entities

from torchperfd.report.numbers import Table
from torchperfd.report.words import cells, facts, headings, title

_SPECIAL = re.compile(r"([\\`*_{}\[\]|~])")


def render(table: Table) -> str:
    """Return the table, ending in a newline."""
    lines = [f"**{escape(title(table))}**", ""]
    if table.rows:
        heads = headings(table)
        lines += [_line(heads), "|---|---|" + "---:|" * (len(heads) - 2)]
        group = ""
        for phase, action, *numbers in cells(table):
            lines.append(_line(["" if phase == group else phase, escape(action), *numbers]))
            group = phase
        lines.append("")
    lines += [f"- {escape(line)}" for line in (*facts(table), *table.notes)]
    return "\n".join(lines).rstrip("\n") + "\n"


def escape(word: str) -> str:
    """Return a word that means nothing but itself."""
    return _SPECIAL.sub(r"\\\1", entities(word, quote=False))


def _line(words: "tuple[str, ...] | list[str]") -> str:
    return "| " + " | ".join(words) + " |"
