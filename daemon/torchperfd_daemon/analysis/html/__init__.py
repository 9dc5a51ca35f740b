"""Renders the analysis as one HTML page that needs no server, no network and no other file.

Style and script are in the page; its Content-Security-Policy allows only their hashes. Data from a trace is
in a block that no browser executes, and the script shows it as text.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np

from torchperfd_daemon.analysis.own_frames import is_library
from torchperfd_daemon.analysis.picture import Picture, StepPicture
from torchperfd_daemon.analysis.timeline import Lane
from torchperfd_daemon.analysis.trace import Int64

# What all ranks of a page share, so that it stays of a size that a browser opens at once.
_RECTANGLES: Final = 160_000
_ROWS: Final = 12_000
# A rank among hundreds has at least these.
_FEWEST_RECTANGLES: Final = 800
_FEWEST_ROWS: Final = 60

_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript>This page draws itself with its own script, which is switched off.</noscript>
<main id="report"></main>
<script type="application/json" id="document">{document}</script>
<script>{script}</script>
</body>
</html>
"""


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
    style, script = (_asset(name) for name in ("report.css", "report.js"))
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    names = [Path(entry["trace"]["path"]).name for entry in ranks]
    title = (
        names[0] if len(names) == 1 else f"{Path(ranks[0]['trace']['path']).parent.name}, {len(names)} ranks"
    )
    if run := (document.get("capture") or {}).get("run"):
        title = f"{run}: {title}"
    return _PAGE.format(
        policy=policy,
        title=escape(f"{title} · torchperfd"),
        style=style,
        script=script,
        document=_inert(document | {"ranks": ranks}),
    )


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


def _inert(document: dict[str, Any]) -> str:
    """Return JSON that opens and ends no element, whatever names it holds: ASCII without "<"."""
    return json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return "\n" + Path(__file__).with_name(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the source expression of a Content-Security-Policy that allows just this element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
