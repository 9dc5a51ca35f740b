"""Renders a comparison of two captures as one HTML page."""

from pathlib import Path
from typing import Any, Final

from torchperfd_daemon.analysis.compare_report import (
    COMPARED_HEADS,
    COMPARED_TABLES,
    COMPARED_WORDS,
)
from torchperfd_daemon.analysis.layout import printable
from torchperfd_daemon.pages import render_page

# Of each table, so that the page stays of a size that a browser opens at once.
_ROWS: Final = 3000


def render_comparison_html(document: dict[str, Any]) -> str:
    """Return the page.

    Args:
        document: The output of ``--json``, schema ``torchperfd.comparison/1``; a side that has ``capture``
            is named after its run.
    """
    tables = {name: _largest(document[name]) for name in COMPARED_TABLES}
    counts = {name: len(document[name]) for name in COMPARED_TABLES}
    title = " → ".join(printable(_name(document[side])) for side in ("before", "after"))
    shown = document | tables | {"rows": counts, "heads": COMPARED_HEADS, "words": COMPARED_WORDS}
    return render_page("comparison", title, shown)


def _largest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that differ, then the others; of each the largest difference first."""
    unit = "difference_us" if rows and "difference_us" in rows[0] else "difference_bytes"
    return sorted(rows, key=lambda row: (row["status"] == "same", -abs(row[unit])))[:_ROWS]


def _name(side: dict[str, Any]) -> str:
    """Return a side's run and capture, else its file or the directory of its files."""
    path = Path(side["paths"][0])
    name = path.name if len(side["paths"]) == 1 else path.parent.name
    capture = side.get("capture") or {}
    return f"{capture['run']} {capture['capture_id']}" if capture.get("run") else name
