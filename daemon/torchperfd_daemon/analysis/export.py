"""Exports results: tables of numbers, pandas' tables, and HTML pages."""

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, overload

import numpy as np

from torchperfd.document.blocks import Document
from torchperfd.document.tables import Table
from torchperfd_daemon.analysis.callers import is_library
from torchperfd_daemon.analysis.comparison import ComparedTable, Comparison
from torchperfd_daemon.analysis.comparison_report import (
    COMPARED_HEADS,
    COMPARED_TABLES,
    COMPARED_WORDS,
    change_to_dict,
)
from torchperfd_daemon.analysis.layout import printable
from torchperfd_daemon.analysis.picture import Lane, Picture, StepPicture
from torchperfd_daemon.analysis.report import to_dict
from torchperfd_daemon.analysis.summary import Summary, SummaryTable
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.pages import render_page


def csv_document(ranks: Iterable[tuple[int | None, Summary]], sort_by: str = "self") -> Document:
    """Return the operator tables for programs: the JSON's keys, a line for every row."""
    rows = [{"rank": rank, **row} for rank, one in ranks for row in to_dict(one, rank, sort_by)["operators"]]
    cells = [[_plain(value) for value in row.values()] for row in rows]
    return Document([[Table(list(rows[0]) if rows else ["rank"], cells)]])


@overload
def to_pandas(result: Summary, table: SummaryTable = "operators") -> Any: ...
@overload
def to_pandas(result: Comparison, table: ComparedTable = "operators") -> Any: ...
def to_pandas(result: Summary | Comparison, table: Any = "operators") -> Any:
    """Return one table as a ``pandas.DataFrame``; its columns are the keys of the JSON.

    An object within a row becomes columns such as ``breakdown.idle_us``.

    Raises:
        TorchperfdError: pandas is not installed.
    """
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        raise TorchperfdError("pandas is not installed", "pip install pandas") from None
    if isinstance(result, Comparison):
        rows = [change_to_dict(row, in_bytes=table == "memory") for row in result.table(table)]
    else:
        rows = [_flat(row) for row in to_dict(result, result.rank)[table]]
    return pandas.DataFrame(rows)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        parts = {f"{key}.{part}": each for part, each in value.items()} if isinstance(value, dict) else None
        flat |= {key: value} if parts is None else parts
    return flat


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " < ".join(value)
    return "" if value is None else str(value)


# What all ranks of a page share, so that it stays of a size that a browser opens at once.
_RECTANGLES: Final = 160_000
_ROWS: Final = 12_000
_TIMELINE: Final = "names resolution_ns lanes_left_out events_left_out"
# A rank among hundreds has at least these.
_MIN_RECTANGLES: Final = 800
_MIN_ROWS: Final = 60


def rectangles_for(ranks: int) -> int:
    """Return how many rectangles the timeline of each rank may have on a page of so many ranks."""
    return max(_MIN_RECTANGLES, _RECTANGLES // ranks)


def render_html(document: dict[str, Any], pictures: Sequence[Picture | None]) -> str:
    """Return the page.

    Args:
        document: The output of ``--json``, schema ``torchperfd.analysis/1``; where it has ``capture``, the
            page's title has its run.
        pictures: The picture of each entry of its ``ranks``; None for a rank without one.
    """
    rows = max(_MIN_ROWS, _ROWS // max(1, len(pictures)))
    ranks = [
        _with_rows(entry, rows) | {"picture": picture and _picture(picture)}
        for entry, picture in zip(document["ranks"], pictures, strict=True)
    ]
    names = [Path(entry["trace"]["path"]).name for entry in ranks]
    title = (
        names[0] if len(names) == 1 else f"{Path(ranks[0]['trace']['path']).parent.name}, {len(names)} ranks"
    )
    if run := (document.get("capture") or {}).get("run"):
        title = f"{run}: {title}"
    return render_page("capture", title, document | {"ranks": ranks})


def _with_rows(entry: dict[str, Any], rows: int) -> dict[str, Any]:
    operators = sorted(
        entry["operators"], key=lambda row: max(row["self_cpu_us"], row["self_device_us"]), reverse=True
    )
    return entry | {
        "operators": operators[:rows],
        "kernels": entry["kernels"][:rows],
        "n_operators": len(entry["operators"]),
        "n_kernels": len(entry["kernels"]),
    }


def _picture(picture: Picture) -> dict[str, Any]:
    """Return a picture as numbers, starts as distances from the one before, which are shorter to write."""
    timeline, flame = picture.timeline, picture.flame
    return {
        **_values(timeline, _TIMELINE),
        "lanes": [_lane(lane) for lane in timeline.lanes],
        "step": picture.step and _step(picture.step),
        "flame": {
            **_values(flame, "names parent name total_ns calls left_out"),
            "library": [number for number, name in enumerate(flame.names) if is_library(name)],
        },
    }


def _values(of: object, names: str) -> dict[str, Any]:
    """Return the named attributes, columns as lists."""
    values = {name: getattr(of, name) for name in names.split()}
    return {name: each.tolist() if isinstance(each, np.ndarray) else each for name, each in values.items()}


def _lane(lane: Lane) -> dict[str, Any]:
    return {
        **_values(lane, "kind label level name count"),
        "start": np.diff(lane.start, prepend=0).tolist(),
        "length": (lane.end - lane.start).tolist(),
    }


def _step(step: StepPicture) -> dict[str, Any]:
    return {
        "index": step.index,
        "start_ns": step.start,
        "end_ns": step.end,
        "shapes": step.shapes,
        **_values(step.timeline, _TIMELINE),
        "lanes": [
            _lane(lane) | {"shape": shape.tolist(), "correlation": correlation.tolist()}
            for lane, shape, correlation in zip(
                step.timeline.lanes, step.shape, step.correlation, strict=True
            )
        ],
    }


# Of each table, so that the page stays of a size that a browser opens at once.
_COMPARED_ROWS: Final = 3000


def render_comparison_html(document: dict[str, Any]) -> str:
    """Return the page.

    Args:
        document: The output of ``--json``, schema ``torchperfd.comparison/1``; a side that has ``capture``
            is named after its run.
    """
    tables = {name: _largest_changes(document[name]) for name in COMPARED_TABLES}
    counts = {name: len(document[name]) for name in COMPARED_TABLES}
    title = " → ".join(printable(_side_name(document[side])) for side in ("before", "after"))
    shown = document | tables | {"rows": counts, "heads": COMPARED_HEADS, "words": COMPARED_WORDS}
    return render_page("comparison", title, shown)


def _largest_changes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that differ, then the others; of each the largest difference first."""
    unit = "difference_us" if rows and "difference_us" in rows[0] else "difference_bytes"
    return sorted(rows, key=lambda row: (row["status"] == "same", -abs(row[unit])))[:_COMPARED_ROWS]


def _side_name(side: dict[str, Any]) -> str:
    path = Path(side["paths"][0])
    name = path.name if len(side["paths"]) == 1 else path.parent.name
    capture = side.get("capture") or {}
    return f"{capture['run']} {capture['capture_id']}" if capture.get("run") else name
