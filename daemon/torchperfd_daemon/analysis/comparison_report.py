"""A `Comparison` as a document for people, and as a dictionary for programs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, get_args

from torchperfd.document.blocks import Block, Document, Heading, Sentences
from torchperfd.document.tables import Table
from torchperfd.model.formatting import ns_text
from torchperfd_daemon.analysis.comparison import (
    LEVEL,
    UNKNOWN_NOISE_OF_ROW,
    UNKNOWN_NOISE_OF_STEP,
    Change,
    ComparedTable,
    Comparison,
    Side,
)
from torchperfd_daemon.analysis.layout import ms, name_in_sentence, printable, table

COMPARISON_SCHEMA: Final = "torchperfd.comparison/1"
COMPARED_TABLES: Final[tuple[ComparedTable, ...]] = get_args(ComparedTable)
COMPARISON_ORDERS: Final[dict[str, Callable[[Change], float]]] = {
    "difference": lambda row: abs(row.difference),
    "percent": lambda row: float("inf") if row.percent is None else abs(row.percent),
    "before": lambda row: row.before,
    "after": lambda row: row.after,
}
_MEMORY: Final[ComparedTable] = "memory"
# Tables with few rows are shown as a whole; in the others only rows that differ are shown.
_WHOLE: Final = frozenset({"phases", "device", _MEMORY})
COMPARED_HEADS: Final[dict[ComparedTable, str]] = {
    "phases": "phase of the step",
    "device": "device",
    "operators": "operator (self CPU)",
    "launched": "operator (its kernels)",
    "kernels": "kernel",
    _MEMORY: "memory",
}
COMPARED_WORDS: Final = {
    "comm": "communication",
    "memcpy": "copies",
    "exposed_comm": "exposed communication",
    "exposed_memcpy": "exposed copies",
    "host_allocated": "allocated on the host",
    "host_peak": "peak on the host, above the recording's start",
    "device_allocated": "allocated on the device",
    "device_peak": "peak on the device, above the recording's start",
}
_MINUS: Final = "\N{MINUS SIGN}"


def comparison_to_dict(comparison: Comparison, sort_by: str = "difference") -> dict[str, Any]:
    """Return the ``torchperfd.comparison/1`` document; times in µs, memory in bytes."""
    return {
        "schema": COMPARISON_SCHEMA,
        "headline": headline(comparison),
        "before": _side(comparison.before),
        "after": _side(comparison.after),
        "per": "step" if comparison.per_step else "recording",
        "noise_known": comparison.noise_known,
        "level": LEVEL,
        "notes": _notes(comparison),
        "step": change_to_dict(comparison.step),
        **{
            table: [
                change_to_dict(row, in_bytes=table == _MEMORY)
                for row in _ordered(comparison.table(table), sort_by)
            ]
            for table in COMPARED_TABLES
        },
        "ranks": [{"rank": rank, **change_to_dict(step)} for rank, step in comparison.ranks],
    }


def change_to_dict(row: Change, *, in_bytes: bool = False) -> dict[str, Any]:
    """Return one row of the document."""
    unit, scale = ("bytes", 1) if in_bytes else ("us", 1000)
    return {
        "name": row.name,
        "status": row.status,
        f"before_{unit}": row.before / scale,
        f"after_{unit}": row.after / scale,
        f"difference_{unit}": row.difference / scale,
        "difference_pct": row.percent,
        "calls_before": row.calls_before,
        "calls_after": row.calls_after,
        "p_value": row.p_value,
    }


def _side(side: Side) -> dict[str, Any]:
    return {"paths": list(side.paths), "steps": side.steps, "device_names": list(side.device_names)}


def headline(comparison: Comparison, width: int | None = None) -> str:
    """Return one sentence with the change of the step and the rows that caused most of it."""

    def name(row: Change) -> str:
        return name_in_sentence(row.name, width)

    step = comparison.step
    what = "B's steps take" if comparison.per_step else "B's recording takes"
    times = f"{what} {ns_text(step.after)}, A's {ns_text(step.before)} ({_percent(step)})"
    if beside := comparison.kernels_beside():
        changed = ", ".join(f"{_added(row)}{_in_percent(row)} in {name(row)}" for row in beside)
        within = "within noise" if comparison.noise_known else "too little to count"
        return f"{times}: the step's difference is {within}, but kernels changed: {changed}"
    if step.status == "same":
        return f"{times}: no change {'beyond noise' if comparison.noise_known else 'that counts'}"
    causes = ", ".join(f"{_added(row)} in {name(row)}" for row in comparison.causes())
    return f"{times}: {causes}" if causes else times


def comparison_document(
    comparison: Comparison, *, limit: int = 15, sort_by: str = "difference", width: int | None = None
) -> Document:
    """Return the headline, what is compared, and of each table the first ``limit`` rows that differ."""
    sides = (f"A: {_described(comparison.before)}", f"B: {_described(comparison.after)}")
    head = Heading(headline(comparison, width), style="bold")
    above = (head, Sentences((*sides, *_notes(comparison)), is_list=True))
    return Document([above, *_sections(comparison, limit, sort_by)])


def _notes(comparison: Comparison) -> list[str]:
    if comparison.noise_known:
        return []
    why = "a side has one step only" if comparison.per_step else "a side has no steps"
    return [
        f"noise is unknown, {why}: a row counts as changed when it differs by "
        f"{UNKNOWN_NOISE_OF_ROW:.0%}, and by {UNKNOWN_NOISE_OF_STEP:.0%} of the whole"
    ]


def _described(side: Side) -> str:
    others = f" and {len(side.paths) - 1:,} more" if len(side.paths) > 1 else ""
    steps = f", {side.steps:,} step{'s' * (side.steps > 1)}" if side.steps else ""
    return f"{printable(side.paths[0])}{others}{steps}"


def _sections(comparison: Comparison, limit: int, sort_by: str) -> Iterator[list[Block]]:
    if comparison.ranks:
        steps = [replace(step, name="?" if rank is None else str(rank)) for rank, step in comparison.ranks]
        yield [_table("rank", steps)]
    for name in COMPARED_TABLES:
        rows, head = _ordered(comparison.table(name), sort_by), COMPARED_HEADS[name]
        if name in _WHOLE and rows:
            named = [replace(row, name=COMPARED_WORDS.get(row.name, row.name)) for row in rows]
            yield [_table(head, named, "MB" if name == _MEMORY else "ms")]
        elif rows:
            differing = [row for row in rows if row.status != "same"]
            below = _below(len(rows), len(differing), limit)
            if differing:
                yield [_table(head, differing[:limit]), Sentences([below] * bool(below))]
            else:
                yield [Sentences([f"{head}: {below}"])]


def _below(rows: int, differing: int, limit: int) -> str:
    hidden, same = max(differing - limit, 0), rows - differing
    parts = [f"{hidden:,} more differ, --limit {differing} shows all"] * bool(hidden)
    parts += [f"{same:,} of {rows:,} rows {'do' if same > 1 else 'does'} not differ"] * bool(same)
    return "; ".join(parts)


def _table(head: str, rows: Sequence[Change], unit: str = "ms") -> Table:
    """Lay out changes, ns as ms and bytes as MB; calls have columns only where something is called."""
    called = any(row.calls_before is not None for row in rows)
    headings = (head, f"A {unit}", f"B {unit}", f"B {_MINUS} A", "%", *(("A calls", "B calls") * called), "")
    return table(
        headings, [(printable(row.name), *_cells(row), *(_calls(row) * called), row.status) for row in rows]
    )


def _cells(row: Change) -> tuple[str, ...]:
    return ms(row.before), ms(row.after), _signed(row.difference, ms(abs(row.difference))), _percent(row)


def _calls(row: Change) -> tuple[str, ...]:
    return tuple(f"{calls or 0:,.1f}".removesuffix(".0") for calls in (row.calls_before, row.calls_after))


def _percent(row: Change) -> str:
    if row.percent is None:
        return ""
    size = abs(row.percent)
    return _signed(row.percent, f"{size:,.0f} %" if size >= 10 else f"{size:.1f} %")


def _added(row: Change) -> str:
    return _signed(row.difference, ns_text(abs(row.difference)))


def _in_percent(row: Change) -> str:
    return f" ({_percent(row)})" if row.status == "changed" else f" ({row.status})"


def _signed(number: float, size: str) -> str:
    return f"{_MINUS if number < 0 else '+'}{size}" if number else size


def _ordered(rows: Sequence[Change], sort_by: str) -> list[Change]:
    return sorted(rows, key=COMPARISON_ORDERS[sort_by], reverse=True)
