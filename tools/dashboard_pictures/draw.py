"""Draws pictures of the dashboards with Grafana's own panels, from a real Prometheus.

    python tools/dashboard_pictures/draw.py [--prometheus URL --instance HOST:PORT] [NAME ...]

Needs npm and its registry, for @grafana/ui, and Chromium. There is no Grafana server: its panels draw what
Prometheus answers to each query of the dashboards, open rows only. Without --prometheus it watches a
simulated node for as long as the pictures show. The pictures go to docs/images, or to another folder --into.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.browser import Browser  # noqa: E402
from tests.promql import filled, panels  # noqa: E402
from tests.support.node import Node, eventually  # noqa: E402
from tests.support.prometheus import start_prometheus  # noqa: E402
from tools.pictures import save  # noqa: E402

HERE: Final = Path(__file__).parent
WIDTH: Final = 24 * 64 + 24
POINTS: Final = 240
FAULT_WITHIN_S: Final = 400
SEEN_S: Final = 10
# The bottom of the last panel that the window shows whole.
WHOLE_PANELS: Final = """Math.ceil(Math.max(...[...document.querySelectorAll(".panel")]
  .map((panel) => panel.getBoundingClientRect().bottom).filter((bottom) => bottom < innerHeight))) + 6"""


class Prometheus:
    """Answers of a Prometheus over one range.

    Args:
        seconds: Length of the range, which ends now.
    """

    def __init__(self, url: str, seconds: float) -> None:
        self._url = url
        self.until = float(int(time.time()))
        self.since = self.until - seconds
        self._step = seconds / POINTS

    def series(self, expr: str, *, instant: bool) -> Iterator[dict[str, Any]]:
        """Yield labels, times in milliseconds and values of each series of a query."""
        kind, asked = "query", {"query": expr, "time": self.until}
        if not instant:
            kind = "query_range"
            asked = {"query": expr, "start": self.since, "end": self.until, "step": self._step}
        url = f"{self._url}/api/v1/{kind}?{urllib.parse.urlencode(asked)}"
        with urllib.request.urlopen(url, timeout=60) as response:
            found = json.load(response)["data"]["result"]
        for each in found:
            points = dict(each["values"] if "values" in each else [each["value"]])
            # Where there is no sample, there is a gap.
            moments = [self.until] if instant else [self.since + at * self._step for at in range(POINTS + 1)]
            known = {round(moment, 1): value for moment, value in points.items()}
            values = [known.get(round(moment, 1), "NaN") for moment in moments]
            yield {
                "labels": each["metric"],
                "times": [1000 * moment for moment in moments],
                "values": [None if value in ("NaN", "+Inf", "-Inf") else float(value) for value in values],
            }


def bundle(directory: Path) -> None:
    """Write the script and the style that draw Grafana's panels; npm fetches these into the directory."""
    for name in ("package.json", "panels.jsx"):
        (directory / name).write_text((HERE / name).read_text())
    subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--silent"],
        cwd=directory,
        check=True,
    )
    loaders = [f"--loader:.{kind}=dataurl" for kind in ("svg", "png", "ttf")]
    defined = ['--define:process.env.NODE_ENV="production"', "--define:global=window"]
    esbuild = directory / "node_modules" / ".bin" / "esbuild"
    subprocess.run(
        [str(esbuild), "panels.jsx", "--bundle", "--minify", "--outfile=panels.js", *loaders, *defined],
        cwd=directory,
        check=True,
    )


def answers(dashboard: dict[str, Any], prometheus: Prometheus, values: dict[str, str]) -> dict[str, Any]:
    """Return what Prometheus answers to each panel, by its id, in the form that panels.jsx draws."""
    found: dict[str, Any] = {}
    for panel in panels(dashboard):
        targets = [
            (
                target,
                list(prometheus.series(filled(target["expr"], values), instant=bool(target.get("instant")))),
            )
            for target in panel["targets"]
        ]
        if panel["type"] == "table":
            found[str(panel["id"])] = {"columns": _merged(panel, targets)}
            continue
        for target, series in targets:
            for each in series:
                each["legend"] = _legend(target["legendFormat"], each["labels"])
        found[str(panel["id"])] = [each for _, series in targets for each in series]
    return found


def _legend(template: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        template = template.replace(f"{{{{{name}}}}}", value)
    return template


def _merged(panel: dict[str, Any], targets: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> list[Any]:
    """Return a table's columns: the labels, then a column for each query, as Grafana's merge does."""
    organized = panel["transformations"][1]["options"]
    order = organized["indexByName"]
    keys = [name for name in sorted(order, key=order.__getitem__) if not name.startswith("Value #")]
    if not keys and targets[0][1]:
        keys = [label for label in targets[0][1][0]["labels"] if label != "__name__"]
    rows: dict[tuple[str, ...], dict[str, float | None]] = {}
    for target, series in targets:
        for each in series:
            # A query without some of the labels belongs to the row that agrees in the others.
            labels = each["labels"]
            mine = tuple(labels.get(key, "") for key in keys)
            row = next((known for known in rows if _agree(known, mine)), mine)
            rows.setdefault(row, {})[target["refId"]] = each["values"][-1]
    columns: list[Any] = [
        {"name": key, "text": True, "values": [row[at] for row in rows]} for at, key in enumerate(keys)
    ]
    for target, _ in targets:
        name = organized["renameByName"].get(f"Value #{target['refId']}")
        if name:
            columns.append({"name": name, "values": [cells.get(target["refId"]) for cells in rows.values()]})
    return columns


def _agree(known: tuple[str, ...], mine: tuple[str, ...]) -> bool:
    return all(not one or not other or one == other for one, other in zip(known, mine, strict=True))


def main() -> int:
    """Draw the dashboards that are named, or all."""
    parser = argparse.ArgumentParser(description="Draw pictures of the dashboards.")
    parser.add_argument("names", nargs="*", help="dashboards, such as fleet; all of them by default")
    parser.add_argument("--prometheus", metavar="URL", help="by default a new one, of a simulated node")
    parser.add_argument("--run", default="demo")
    parser.add_argument("--rank", default="5")
    parser.add_argument("--instance", default="127.0.0.1:9407")
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--height", type=int, default=1000, help="of the pictures at most; 0 for all")
    parser.add_argument("--mode", choices=("dark", "light"), default="dark")
    parser.add_argument("--into", type=Path, metavar="DIRECTORY", help="docs/images by default")
    chosen = parser.parse_args()
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # First, since the fault that the simulated node has at the end may be over a minute later.
        bundle(directory)
        if chosen.prometheus is None:
            chosen.prometheus, chosen.instance = stack.enter_context(simulated(60 * chosen.minutes))
        problems = draw(chosen, directory)
    for problem in problems:
        print(problem[:400], file=sys.stderr)
    return 1 if problems else 0


@contextlib.contextmanager
def simulated(seconds: float) -> Iterator[tuple[str, str]]:
    """Run a simulated node and a Prometheus; yield its address and the node's when it has seen enough."""
    node = Node()
    node.start_daemon("--demo")
    with tempfile.TemporaryDirectory() as directory:
        prometheus = start_prometheus(Path(directory), {"torchperfd": node.metrics_port})
        try:
            time.sleep(seconds)
            # The picture is of a run with a fault, which Prometheus has seen for a while.
            eventually(lambda: starves(node), FAULT_WITHIN_S)
            time.sleep(SEEN_S)
            yield f"http://127.0.0.1:{prometheus.port}", f"127.0.0.1:{node.metrics_port}"
        finally:
            prometheus.stop()
            node.close()


def starves(node: Node) -> bool:
    """Return whether the verdict on the simulated run is that it waits for data, which lasts two minutes."""
    status, document = node.get("/api/v1/runs")
    verdicts = [each["verdict"] for each in json.loads(document)["runs"]] if status == 200 else []
    return any(verdict and verdict["cause"] == "input-bound" for verdict in verdicts)


def draw(chosen: argparse.Namespace, directory: Path) -> list[str]:
    """Draw what was chosen, in a directory with the bundle; return what went wrong in the browser."""
    files = sorted((ROOT / "grafana" / "dashboards").glob("*.json"))
    if chosen.into:
        chosen.into.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    with Browser() as browser:
        for file in files:
            if chosen.names and file.stem not in chosen.names:
                continue
            dashboard = json.loads(file.read_text())
            prometheus = Prometheus(chosen.prometheus, 60 * chosen.minutes)
            values = {
                "run": chosen.run,
                "rank": ".*" if file.stem == "run" else chosen.rank,
                "instance": chosen.instance,
                "gpu": ".*",
                "top": "12",
                "__rate_interval": "30s",
                "__range": f"{60 * chosen.minutes:.0f}s",
                "__range_s": f"{60 * chosen.minutes:.0f}",
            }
            drawing = {
                "dashboard": dashboard,
                "answers": answers(dashboard, prometheus, values),
                "from": 1000 * prometheus.since,
                "to": 1000 * prometheus.until,
                "mode": chosen.mode,
            }
            page = directory / "page.html"
            inert = json.dumps(drawing).replace("<", "\\u003c")
            page.write_text(
                '<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="panels.css"><body>'
                f"<script>window.drawing = {inert}</script>"
                '<script src="panels.js"></script>'
            )
            browser.look_like(WIDTH, chosen.height or 1000, chosen.mode)
            browser.open(page)
            browser.drawn()
            time.sleep(1)  # charts measure their text a moment after they are in the page
            problems += [f"{file.stem}: {each}" for each in browser.run("window.problems")]
            problems += [f"{file.stem}: {each}" for each in browser.complaints if "Error" in each]
            if chosen.height:
                browser.look_like(WIDTH, browser.run(WHOLE_PANELS), chosen.mode)
                browser.drawn()
            name, picture = f"dashboard-{file.stem}.png", browser.screenshot(whole=not chosen.height)
            if chosen.into:
                (chosen.into / name).write_bytes(picture)
            else:
                save(name, picture)
    return problems


if __name__ == "__main__":
    sys.exit(main())
