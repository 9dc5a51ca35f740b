"""The phase table as a document, with its units, digits and headings; and its numbers for programs."""

from collections.abc import Iterator

from torchperfd.document import tables
from torchperfd.document.blocks import Document, Heading, Sentences
from torchperfd.model.formatting import duration, size
from torchperfd.report.numbers import CSV_COLUMNS, Row, Table

NOTHING = "-"
_HEADINGS = ("Phase", "Action", "Mean duration", "Std dev", "Calls", "Samples/s", "Total", "% of total")
_ON_DEVICE = 4
"""Where the mean time on the device goes, which only tables have that were made beside a device."""


def title(table: Table) -> str:
    if not table.rows:
        return f"rank {table.rank}: no step was seen"
    parts = [f"rank {table.rank}"]
    if table.steps:
        parts += ["train", f"{table.steps} step{'s' if table.steps > 1 else ''}"]
        parts += [f"{_duration(table.step_seconds)} a step", *_rates(table)]
    else:
        steps = table.totals.validate.steps
        parts += ["validate", f"{steps} step{'s' if steps > 1 else ''}"]
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
    return " · ".join([steps, f"{_duration(table.step_seconds)} a step{spread}", *_rates(table)])


def _rates(table: Table) -> list[str]:
    rates = {"samples/s": table.samples_per_second, "tokens/s": table.tokens_per_second}
    return [f"{rate(each)} {unit}" for unit, each in rates.items() if each is not None]


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
    totals, saves, background = table.totals, table.totals.checkpoint, table.totals.background_saves
    if table.flops_per_second is not None:
        used = (
            "" if table.flops_utilization is None else f" · {table.flops_utilization:.1%} of the peak (MFU)"
        )
        yield f"compute: {_scaled(table.flops_per_second)}FLOP/s{used}"
    if (memory := totals.cuda) is not None:
        yield (
            f"CUDA memory: {size(memory.allocated_bytes)} allocated · {size(memory.reserved_bytes)} reserved"
            f" · {size(memory.peak_bytes)} at the peak"
        )
    if totals.host_memory is not None:
        yield f"memory: {totals.host_memory.words}"
    actions = {row.action for row in table.rows if row.phase == "train"}
    if "backward" in actions and "forward" not in actions and not totals.degradation_level:
        yield (
            "forward: not seen, its time is part of other: the model's methods are called, not the model; "
            'put the call into `with client.phase("forward")`'
        )
    if saves.calls:
        yield f"checkpoints between steps: {saves.calls:,} · {duration(saves.seconds)}"
    if background.calls:
        spent = duration(background.seconds)
        yield f"checkpoints in the background: {background.calls:,} · {spent} beside the steps"
    if table.sync_line:
        yield f"sync_wait: {sync_words(table)}"
    if table.input_stages:
        yield f"input: {table.input_stages}"
    if totals.train.skipped:
        yield f"skipped optimizer steps: {totals.train.skipped:,}"
    if table.gc_seconds is not None:
        yield f"garbage collector: {duration(table.gc_seconds)}, within the phases above and between steps"
    if totals.overhead is not None or totals.degradation_level:
        parts = [] if totals.overhead is None else [f"{_rounded(totals.overhead)} of the time of training"]
        if totals.degradation_level:
            parts.append(f"degradation level {totals.degradation_level}")
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


_WIDTH = 96
"""Columns of the table off a terminal."""
_WORDS = 2
"""Columns of words; the others are numbers."""


def document(table: Table) -> Document:
    """Return the table as a document: its rows, the facts and the notes."""
    notes = (*facts(table), *(f"note: {note}" for note in table.notes))
    below = Sentences(notes, indent=2, is_list=True)
    if not table.rows:
        return Document([[Heading(title(table)), below]])
    heads = headings(table)
    drawn = tables.Table(
        heads,
        _grouped(table),
        left=heads[:_WORDS],
        shorten=heads[1],
        lift=heads[1:_WORDS],
        indent=2,
        plain_width=_WIDTH,
        is_grouped=True,
        caption=title(table),
        shares=[row.share for row in table.rows],
    )
    return Document([[drawn, below]])


def _grouped(table: Table) -> list[tuple[str, ...]]:
    """Return the words of each row, without the phase where it is that of the row above."""
    rows, above = [], ""
    for phase, *words in cells(table):
        rows.append(("" if phase == above else phase, *words))
        above = phase
    return rows


def raw_document(table: Table) -> Document:
    """Return the rows for programs: seconds, no units, empty where nothing is."""
    rows = [[_raw(getattr(row, column)) for column in CSV_COLUMNS] for row in table.rows]
    return Document([[tables.Table(CSV_COLUMNS, rows)]])


def _raw(value: str | float | None) -> str:
    if value is None:
        return ""
    # Only nanoseconds are known.
    return f"{value:.9f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
