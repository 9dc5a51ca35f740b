"""Writes the dashboards, the rules and the rules' tests that are committed next to this file.

Run `python -m grafana.build` in the root of the repository after an edit; `--check` changes nothing and
fails when a committed file is stale.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from grafana.alerting import check, rules_text, tests_text
from grafana.cases import CASES, RECORDED
from grafana.daemon import daemon_dashboard
from grafana.fleet import fleet_dashboard
from grafana.node import node_dashboard
from grafana.rank import rank_dashboard
from grafana.rules import ALERTS, RECORDINGS
from grafana.run import run_dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

OUTPUT: Final = Path(__file__).parent
DASHBOARDS: Final[dict[str, Callable[[], Dashboard]]] = {
    "fleet.json": fleet_dashboard,
    "run.json": run_dashboard,
    "rank.json": rank_dashboard,
    "node.json": node_dashboard,
    "daemon.json": daemon_dashboard,
}
RULES: Final = "torchperfd.rules.yaml"
TESTS: Final = "torchperfd.test.yaml"


_PLUGINS: Final = {
    "bargauge": "Bar gauge",
    "stat": "Stat",
    "table": "Table",
    "timeseries": "Time series",
}


def render(dashboard: Dashboard) -> str:
    """Turn a dashboard into the text of its file: the same text for the same dashboard, always.

    It has the form of an export: `__requires` lists what it needs. Nothing is in `__inputs`, because the
    variable `datasource` offers the data sources there are.
    """
    document = json.loads(json.dumps(dashboard, cls=JSONEncoder))
    used = {each["type"] for panel in document["panels"] for each in (panel, *panel.get("panels", ()))}
    document["__inputs"] = []
    document["__elements"] = {}
    document["__requires"] = [
        {"type": "grafana", "id": "grafana", "name": "Grafana", "version": "11.0.0"},
        {"type": "datasource", "id": "prometheus", "name": "Prometheus", "version": "1.0.0"},
        *(
            {"type": "panel", "id": plugin, "name": _PLUGINS[plugin], "version": ""}
            for plugin in sorted(used - {"row"})
        ),
    ]
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def files() -> dict[str, str]:
    """Return the text of every generated file, by its path below this folder.

    Raises:
        RuleError: An alert lacks a runbook, a limit or a test.
    """
    check(ALERTS, CASES, RECORDINGS, RECORDED)
    return {f"dashboards/{name}": render(make()) for name, make in DASHBOARDS.items()} | {
        f"alerts/{RULES}": rules_text(RECORDINGS, ALERTS),
        f"alerts/{TESTS}": tests_text(RULES, ALERTS, CASES, RECORDED),
    }


def main() -> int:
    """Write every file, or compare each with what is committed."""
    parser = argparse.ArgumentParser(
        prog="python -m grafana.build", description="Write dashboards and rules."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is stale")
    only_check = parser.parse_args().check
    stale = []
    for name, text in files().items():
        path = OUTPUT / name
        if only_check:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                stale.append(name)
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    for name in stale:
        print(f"{name} is stale: run `python -m grafana.build`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
