"""How the numbers of the table read: units, digits, headings. Shared by all layouts for people."""

from torchperfd.report.numbers import Row, Table

HEADINGS = ("Phase", "Action", "Mean duration", "Std dev", "Calls", "Samples/s", "Total", "% of total")
NOTHING = "-"


def title(table: Table) -> str:
    """Return the line above the table."""
    if not table.rows:
        return f"rank {table.rank}: no step was seen"
    parts = [f"rank {table.rank}"]
    if table.steps:
        parts += ["train", f"{table.steps} step{'s' if table.steps > 1 else ''}"]
        parts += [f"{duration(table.step_seconds)} a step"]
        if table.samples_per_second is not None:
            parts += [f"{rate(table.samples_per_second)} samples/s"]
    else:
        parts += ["validate", f"{table.validations} step{'s' if table.validations > 1 else ''}"]
    return " · ".join(parts)


def cells(row: Row) -> tuple[str, ...]:
    """Return a row as the words under ``HEADINGS``."""
    return (
        row.phase,
        row.action,
        duration(row.mean_seconds),
        duration(row.std_seconds),
        NOTHING if row.calls is None else f"{row.calls:,}",
        rate(row.samples_per_second),
        duration(row.seconds_total),
        f"{row.share:.1%}",
    )


def duration(seconds: float | None) -> str:
    """Return a time in the unit that reads best, three significant digits."""
    if seconds is None:
        return NOTHING
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        # What three digits would round up to 1000 of one unit is 1 of the next.
        if seconds >= scale * 0.99949:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def rate(per_second: float | None) -> str:
    """Return a rate; from ten million on, where only the magnitude says anything, in millions."""
    if per_second is None:
        return NOTHING
    if per_second >= 99.95:
        return f"{per_second:,.0f}" if per_second < 1e7 else f"{per_second / 1e6:,.0f}M"
    return f"{per_second:.3g}"
