"""The committed dashboards: current, complete, and made of metrics that exist."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.metric_names import unknown
from tests.promql import Query, panels, queries

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "grafana" / "dashboards").glob("*.json"))
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def load(path: Path) -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return dashboard


def all_queries(dashboard: dict[str, Any]) -> list[Query]:
    return queries(dashboard, run="a run")


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    return load(request.param)


def test_the_committed_files_are_what_the_generator_writes() -> None:
    check = subprocess.run(
        [sys.executable, "-m", "grafana.build", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stderr


def test_the_uid_of_the_run_dashboard_is_stable() -> None:
    assert load(ROOT / "grafana" / "dashboards" / "run.json")["uid"] == "torchperfd-run"


def test_it_can_be_provisioned_as_it_is(dashboard: dict[str, Any]) -> None:
    assert 39 <= dashboard["schemaVersion"] <= 42
    assert "__inputs" not in dashboard
    assert "id" not in dashboard
    by_name = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert list(by_name) == ["datasource", "run", "rank"]
    assert (by_name["datasource"]["type"], by_name["datasource"]["query"]) == ("datasource", "prometheus")
    assert all(by_name[name]["datasource"] == DATASOURCE for name in ("run", "rank"))


def test_panel_ids_are_unique_and_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_panel_says_what_it_shows_and_in_which_unit(dashboard: dict[str, Any]) -> None:
    for panel in panels(dashboard):
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == DATASOURCE, panel["title"]
        assert panel["targets"], panel["title"]
        assert all(target["datasource"] == DATASOURCE for target in panel["targets"]), panel["title"]


def test_ranges_follow_scrape_interval_and_only_counters_rate(dashboard: dict[str, Any]) -> None:
    for panel in panels(dashboard):
        for target in panel["targets"]:
            expr = target["expr"]
            assert set(re.findall(r"\[([^\]]*)\]", expr)) <= {"$__rate_interval"}, expr
            rated = re.findall(r"\b(?:rate|increase|irate)\((\w+)", expr)
            assert all(name.endswith(("_total", "_bucket")) for name in rated), expr
            assert expr.count("[") == len(rated), expr


def test_only_metrics_and_labels_of_the_daemon_are_asked_for(dashboard: dict[str, Any]) -> None:
    for query in all_queries(dashboard):
        assert not unknown(query.expr), query.name


def test_a_panel_about_gpus_says_that_it_may_be_empty(dashboard: dict[str, Any]) -> None:
    about_gpus = [query for query in all_queries(dashboard) if "torchperfd_gpu_" in query.expr]
    assert about_gpus
    assert all(query.may_be_empty for query in about_gpus)


@pytest.mark.needs("promtool")
def test_every_query_is_valid_promql(dashboard: dict[str, Any], tmp_path: Path) -> None:
    rules = [
        {"record": "parsed", "expr": query.expr, "labels": {"number": str(number)}}
        for number, query in enumerate(all_queries(dashboard))
    ]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}), encoding="utf-8")
    check = subprocess.run(
        ["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stderr
    assert f"{len(rules)} rules found" in check.stdout


def test_queries_are_filled_in_as_grafana_would() -> None:
    made = {
        "templating": {
            "list": [
                {"type": "datasource", "name": "datasource"},
                {"type": "query", "name": "run", "query": "label_values(a_info, run)"},
                {"type": "query", "name": "rank", "query": 'label_values(a_info{run="$run"}, rank)'},
            ]
        },
        "panels": [
            {"type": "row", "panels": []},
            {
                "type": "timeseries",
                "title": "P",
                "description": "Empty on Sundays.",
                "targets": [{"refId": "A", "expr": 'rate(b{run="$run",rank=~"${rank}"}[$__rate_interval])'}],
            },
        ],
    }
    assert queries(made, run='x"y', rank="0|1", rate_interval="5s") == [
        Query("variable run", 'group by (run) (a_info{run!=""})', False),
        Query("variable rank", 'group by (rank) (a_info{run="x\\"y",rank!=""})', False),
        Query("P (A)", 'rate(b{run="x\\"y",rank=~"0|1"}[5s])', True),
    ]


def test_variable_without_a_value_is_an_error() -> None:
    made = {
        "templating": {"list": []},
        "panels": [
            {
                "type": "stat",
                "title": "P",
                "description": "",
                "targets": [{"refId": "A", "expr": "a[$__interval]"}],
            }
        ],
    }
    with pytest.raises(ValueError, match="__interval"):
        queries(made, run="r")


def test_provisioning_points_at_the_dashboards_datasource() -> None:
    provisioning = ROOT / "grafana" / "provisioning"
    source = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text(encoding="utf-8"))
    assert [entry["type"] for entry in source["datasources"]] == [DATASOURCE["type"]]
    provider = yaml.safe_load((provisioning / "dashboards" / "torchperfd.yaml").read_text(encoding="utf-8"))
    assert [entry["type"] for entry in provider["providers"]] == ["file"]
