"""The phase table as HTML: one element, styled in place, on whatever background the notebook has."""

from collections.abc import Iterator
from html import escape

from torchperfd.report.numbers import Row, Table
from torchperfd.report.words import cells, facts, headings, title

# In place, since notebooks and mail drop <style>; colours with alpha, since the theme is not ours.
_TABLE = (
    "border-collapse:collapse;font:13px/1.5 system-ui,sans-serif;font-variant-numeric:tabular-nums;"
    "color:inherit;background:transparent;margin:4px 0"
)
_CAPTION = "caption-side:top;text-align:left;padding:4px 10px 6px;font-weight:600;color:inherit"
_CELL = "padding:2px 10px;border:0;white-space:nowrap"
_LINE = "border-top:1px solid rgba(128,128,128,.45)"
_NOTE = "font:12px/1.5 system-ui,sans-serif;opacity:.75;padding:0 10px"
_BAR = "rgba(66,133,244,.28)"
_LEFT = 2


def render(table: Table) -> str:
    """Return the table, ending in a newline."""
    return "\n".join(_lines(table)) + "\n"


def _lines(table: Table) -> Iterator[str]:
    yield "<div>"
    if table.rows:
        yield f'<table style="{_TABLE}">'
        yield f'<caption style="{_CAPTION}">{escape(title(table))}</caption>'
        heads = "".join(
            f'<th scope="col" style="{_CELL};font-weight:600;text-align:{_align(column)}">{escape(word)}</th>'
            for column, word in enumerate(headings(table))
        )
        yield f'<thead><tr style="background:transparent">{heads}</tr></thead>'
        yield "<tbody>"
        group = ""
        for row, texts in zip(table.rows, cells(table), strict=True):
            yield _row(row, texts, first=row.phase != group)
            group = row.phase
        yield "</tbody>"
        yield "</table>"
    else:
        yield f'<p style="{_CAPTION}">{escape(title(table))}</p>'
    for line in (*facts(table), *table.notes):
        yield f'<p style="{_NOTE}">{escape(line)}</p>'
    yield "</div>"


def _row(row: Row, texts: tuple[str, ...], *, first: bool) -> str:
    phase, *words, share = texts
    line = f";{_LINE}" if first else ""
    cell = f"{_CELL}{line}"
    parts = [f'<th scope="row" style="{cell};font-weight:600;text-align:left">{phase if first else ""}</th>']
    parts += [
        f'<td style="{cell};text-align:{_align(column)}">{escape(word)}</td>'
        for column, word in enumerate(words, start=1)
    ]
    percent = f"{min(1.0, row.share):.1%}"
    gradient = f"linear-gradient(to right,{_BAR} {percent},transparent {percent})"
    bar = f"background:{gradient} center/100% 74% no-repeat"
    parts.append(f'<td style="{cell};text-align:right;min-width:90px;{bar}">{share}</td>')
    return f'<tr style="background:transparent">{"".join(parts)}</tr>'


def _align(column: int) -> str:
    return "left" if column < _LEFT else "right"
