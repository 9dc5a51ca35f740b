"""The phase table for people, with its units, digits and headings.

It is laid out as text for a terminal, as Markdown and as HTML.
"""

from collections.abc import Iterator
from html import escape

from torchperfd.model.formatting import duration, size
from torchperfd.model.terminal_text import (
    TextTable,
    beginning,
    escape_markdown,
    fold_text,
    markdown_table,
    text_width,
)
from torchperfd.report.numbers import Row, Table

NOTHING = "-"
_HEADINGS = ("Phase", "Action", "Mean duration", "Std dev", "Calls", "Samples/s", "Total", "% of total")
_ON_DEVICE = 4
"""Where the mean time on the device goes, which only tables have that were made beside a device."""


def title(table: Table) -> str:
    """Return the line above the table."""
    if not table.rows:
        return f"rank {table.rank}: no step was seen"
    parts = [f"rank {table.rank}"]
    if table.steps:
        parts += ["train", f"{table.steps} step{'s' if table.steps > 1 else ''}"]
        parts += [f"{_duration(table.step_seconds)} a step"]
        if table.samples_per_second is not None:
            parts += [f"{rate(table.samples_per_second)} samples/s"]
        if table.tokens_per_second is not None:
            parts += [f"{rate(table.tokens_per_second)} tokens/s"]
    else:
        parts += ["validate", f"{table.validations} step{'s' if table.validations > 1 else ''}"]
    return " · ".join(parts)


def headline(table: Table, step_percentiles: tuple[float, float] | None) -> str:
    """Return the line above the overview of a run's end: steps, their mean, percentiles and throughput."""
    if not table.steps:
        return title(table)
    spread = ""
    if step_percentiles is not None:
        p50, p95 = step_percentiles
        spread = f" (lately p50 {duration(p50)}, p95 {duration(p95)})"
    steps = f"{table.steps:,} step{'s' if table.steps > 1 else ''}"
    parts = [steps, f"{_duration(table.step_seconds)} a step{spread}"]
    if table.samples_per_second is not None:
        parts.append(f"{rate(table.samples_per_second)} samples/s")
    if table.tokens_per_second is not None:
        parts.append(f"{rate(table.tokens_per_second)} tokens/s")
    return " · ".join(parts)


def headings(table: Table) -> tuple[str, ...]:
    """Return the words above the columns; the first two are columns of words."""
    return _with_device(_HEADINGS, "On device") if table.on_device else _HEADINGS


def cells(table: Table) -> list[tuple[str, ...]]:
    """Return the rows as the words under :func:`headings`."""
    return [_cells(row, on_device=table.on_device) for row in table.rows]


def facts(table: Table) -> tuple[str, ...]:
    """Return the lines below the table: what is known beside the phases, and no more."""
    return tuple(_facts(table)) if table.rows else ()


def rate(per_second: float | None) -> str:
    """Return a rate; from ten million on, where only the magnitude matters, in millions."""
    if per_second is None:
        return NOTHING
    if per_second >= 99.95:
        return f"{per_second:,.0f}" if per_second < 1e7 else f"{per_second / 1e6:,.0f}M"
    return f"{per_second:.3g}"


def _facts(table: Table) -> Iterator[str]:
    if table.flops_per_second is not None:
        used = (
            "" if table.flops_utilization is None else f" · {table.flops_utilization:.1%} of the peak (MFU)"
        )
        yield f"compute: {_scaled(table.flops_per_second)}FLOP/s{used}"
    if table.cuda is not None:
        memory = table.cuda
        yield (
            f"CUDA memory: {size(memory.allocated_bytes)} allocated · {size(memory.reserved_bytes)} reserved"
            f" · {size(memory.peak_bytes)} at the peak"
        )
    if table.host_memory is not None:
        yield f"memory: {table.host_memory.words}"
    actions = {row.action for row in table.rows if row.phase == "train"}
    if "backward" in actions and "forward" not in actions and not table.degradation_level:
        yield (
            "forward: not seen, its time is part of other: the model's methods are called, not the model; "
            'put the call into `with client.phase("forward")`'
        )
    if table.saves:
        yield f"checkpoints between steps: {table.saves:,} · {duration(table.save_seconds)}"
    if table.background_saves:
        spent = duration(table.background_save_seconds)
        yield f"checkpoints in the background: {table.background_saves:,} · {spent} beside the steps"
    if table.sync_line:
        yield f"sync_wait: {sync_words(table)}"
    if table.input_stages:
        yield f"input: {table.input_stages}"
    if table.skipped:
        yield f"skipped optimizer steps: {table.skipped:,}"
    if table.gc_seconds is not None:
        yield f"garbage collector: {duration(table.gc_seconds)}, within the phases above and between steps"
    if table.overhead is not None or table.degradation_level:
        parts = [] if table.overhead is None else [f"{_rounded(table.overhead)} of the time of training"]
        if table.degradation_level:
            parts.append(f"degradation level {table.degradation_level}")
        yield f"overhead of torchperfd: {' · '.join(parts)}"


def sync_words(table: Table) -> str:
    """Return how long a step waits for the device, and in which line; the table has such a line."""
    waited = duration(table.sync_wait_seconds)
    return f"{waited} a step wait for the device, most of it in {table.sync_line}"


def _rounded(overhead: float) -> str:
    return "under 0.1%" if overhead < 0.001 else f"{overhead:.1%}"


def _cells(row: Row, *, on_device: bool) -> tuple[str, ...]:
    words = (
        row.phase,
        row.action,
        _duration(row.mean_seconds),
        _duration(row.std_seconds),
        NOTHING if row.calls is None else f"{row.calls:,}",
        rate(row.samples_per_second),
        _duration(row.seconds_total),
        f"{row.share:.1%}",
    )
    return _with_device(words, _duration(row.device_mean_seconds)) if on_device else words


def _with_device(words: tuple[str, ...], word: str) -> tuple[str, ...]:
    return (*words[:_ON_DEVICE], word, *words[_ON_DEVICE:])


def _scaled(number: float) -> str:
    """Return a number with the prefix of its magnitude, three significant digits."""
    for scale, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= scale * 0.9995:
            return f"{number / scale:.3g} {prefix}"
    return f"{number:.3g} "


def _duration(seconds: float | None) -> str:
    return NOTHING if seconds is None else duration(seconds)


_TEXT_WIDTH = 96
_ACTION_WIDTHS = (13, 24)
"""Least and most characters of an action; in between, what the other columns leave."""
_LEFT_COLUMNS = 2
"""Columns of words; the others are numbers, and flush right."""


def render_text(table: Table, width: int | None = None) -> str:
    """Return the table without a last newline.

    Args:
        width: Columns that it may take; None for as many as it needs.
    """
    return "\n".join(line.rstrip() for line in _text_lines(table, width))


def _text_lines(table: Table, width: int | None) -> Iterator[str]:
    yield fold_text(title(table), width)
    if table.rows:
        lines = list(_wide_table(table))
        if width is not None and max(map(text_width, lines)) > width:
            lines = list(_narrow_table(table, width))
        yield from lines
    for fact in facts(table):
        yield fold_text(f"  {fact}", width)
    for note in table.notes:
        yield fold_text(f"  note: {note}", width)


def _grouped(table: Table) -> list[tuple[str, ...]]:
    """Return the words of each row, without the phase where it is that of the row above."""
    rows, above = [], ""
    for phase, *words in cells(table):
        rows.append(("" if phase == above else phase, *words))
        above = phase
    return rows


def _wide_table(table: Table) -> Iterator[str]:
    heads, rows = headings(table), _grouped(table)
    least, most = _ACTION_WIDTHS
    excess = TextTable(heads, rows).draw().width - _TEXT_WIDTH
    widest = max(text_width(words[1]) for words in (heads, *rows))
    room = min(widest, most, max(least, widest - excess))
    rows = [(phase, _cut_word(action, room), *numbers) for phase, action, *numbers in rows]
    # A cut within a wide character leaves a column free, which the table keeps.
    heads = (heads[0], heads[1].ljust(room), *heads[2:])
    drawn = TextTable(heads, rows, left=heads[:_LEFT_COLUMNS]).draw()
    yield from (f"  {line}" for line in drawn.head)
    for (phase, *_), lines in zip(rows, drawn.rows, strict=True):
        if phase:
            yield "  " + "─" * drawn.width
        yield from (f"  {line}" for line in lines)


def _narrow_table(table: Table, width: int) -> Iterator[str]:
    """Yield the table with the phases on lines of their own, and heads on several."""
    (_, action, *heads), rows = headings(table), _grouped(table)
    drawn = TextTable(
        (action, *heads),
        [row[1:] for row in rows],
        left=(action,),
        shorten=action,
        lift=(action,),
        labels_lifted=False,
        folds_heads=True,
    ).draw(width - 2)
    yield from (f"  {line}" for line in drawn.head)
    for (phase, *_), lines in zip(rows, drawn.rows, strict=True):
        if phase:
            yield f"  ── {phase} ".ljust(drawn.width + 2, "─")
        yield from (f"  {line}" for line in lines)


def _cut_word(word: str, width: int) -> str:
    return word if text_width(word) <= width else f"{beginning(word, width - 1)}…"


def render_markdown(table: Table) -> str:
    """Return the table, ending in a newline."""
    lines = [f"**{escape_markdown(title(table))}**", ""]
    if table.rows:
        heads = headings(table)
        rows = [(phase, escape_markdown(action), *numbers) for phase, action, *numbers in _grouped(table)]
        lines += [*markdown_table(heads, "|---|---|" + "---:|" * (len(heads) - _LEFT_COLUMNS), rows), ""]
    lines += [f"- {escape_markdown(line)}" for line in (*facts(table), *table.notes)]
    return "\n".join(lines).rstrip("\n") + "\n"


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


def render_html(table: Table) -> str:
    """Return the table, ending in a newline."""
    return "\n".join(_html_lines(table)) + "\n"


def _html_lines(table: Table) -> Iterator[str]:
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
        yield from map(_row, table.rows, _grouped(table))
        yield "</tbody>"
        yield "</table>"
    else:
        yield f'<p style="{_CAPTION}">{escape(title(table))}</p>'
    for line in (*facts(table), *table.notes):
        yield f'<p style="{_NOTE}">{escape(line)}</p>'
    yield "</div>"


def _row(row: Row, texts: tuple[str, ...]) -> str:
    phase, *words, share = texts
    cell = f"{_CELL};{_LINE}" if phase else _CELL
    parts = [f'<th scope="row" style="{cell};font-weight:600;text-align:left">{phase}</th>']
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
    return "left" if column < _LEFT_COLUMNS else "right"
