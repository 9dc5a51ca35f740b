"""Renders the analysis of a capture as one HTML page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from torchperfd_daemon.analysis.own_frames import is_library
from torchperfd_daemon.analysis.picture import Picture, StepPicture
from torchperfd_daemon.analysis.timeline import Lane
from torchperfd_daemon.analysis.trace import Int64
from torchperfd_daemon.pages import render_page

# What all ranks of a page share, so that it stays of a size that a browser opens at once.
_RECTANGLES: Final = 160_000
_ROWS: Final = 12_000
# A rank among hundreds has at least these.
_FEWEST_RECTANGLES: Final = 800
_FEWEST_ROWS: Final = 60


def rectangles_for(ranks: int) -> int:
    """Return how many rectangles the timeline of each rank may have on a page of so many ranks."""
    return max(_FEWEST_RECTANGLES, _RECTANGLES // ranks)


def render_html(document: dict[str, Any], pictures: Sequence[Picture | None]) -> str:
    """Return the page.

    Args:
        document: The output of ``--json``, schema ``torchperfd.analysis/1``; where it has ``capture``, the
            page's title has its run.
        pictures: The picture of each entry of its ``ranks``; None for a rank without one.
    """
    rows = max(_FEWEST_ROWS, _ROWS // max(1, len(pictures)))
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
    """Return a rank's entry with the largest rows of its long tables, and how many there were."""
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
        "names": timeline.names,
        "resolution_ns": timeline.resolution_ns,
        "lanes_left_out": timeline.lanes_left_out,
        "events_left_out": timeline.events_left_out,
        "lanes": [_lane(lane) for lane in timeline.lanes],
        "step": picture.step and _step(picture.step),
        "flame": {
            "names": flame.names,
            "library": [number for number, name in enumerate(flame.names) if is_library(name)],
            "parent": flame.parent.tolist(),
            "name": flame.name.tolist(),
            "total_ns": flame.total_ns.tolist(),
            "calls": flame.calls.tolist(),
            "left_out": flame.left_out,
        },
    }


def _lane(lane: Lane) -> dict[str, Any]:
    return {
        "kind": lane.kind,
        "label": lane.label,
        "level": lane.level.tolist(),
        "start": _distances(lane.start),
        "length": (lane.end - lane.start).tolist(),
        "name": lane.name.tolist(),
        "count": lane.count.tolist(),
    }


def _step(step: StepPicture) -> dict[str, Any]:
    return {
        "index": step.index,
        "start_ns": step.start,
        "end_ns": step.end,
        "names": step.timeline.names,
        "shapes": step.shapes,
        "resolution_ns": step.timeline.resolution_ns,
        "lanes_left_out": step.timeline.lanes_left_out,
        "events_left_out": step.timeline.events_left_out,
        "lanes": [
            _lane(lane) | {"shape": shape.tolist(), "correlation": correlation.tolist()}
            for lane, shape, correlation in zip(
                step.timeline.lanes, step.shape, step.correlation, strict=True
            )
        ],
    }


def _distances(column: Int64) -> list[int]:
    distances: list[int] = np.diff(column, prepend=0).tolist()
    return distances
