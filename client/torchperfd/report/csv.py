"""The phase table as comma-separated values, for programs: seconds, no units, empty where nothing is."""

import csv
import io

from torchperfd.report.numbers import Table

COLUMNS = (
    "phase",
    "action",
    "mean_seconds",
    "std_seconds",
    "calls",
    "samples_per_second",
    "seconds_total",
    "share",
    "device_mean_seconds",
)


def render(table: Table) -> str:
    """Return a heading and a line per row."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in table.rows:
        writer.writerow(_plain(getattr(row, column)) for column in COLUMNS)
    return out.getvalue()


def _plain(value: str | float | None) -> str:
    if value is None:
        return ""
    # Only nanoseconds are known.
    return f"{value:.9f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
