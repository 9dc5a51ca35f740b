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
