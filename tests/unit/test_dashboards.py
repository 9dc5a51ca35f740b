"""The committed dashboards: current, complete, and made of metrics that exist."""

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
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


VARIABLES = {
    "fleet": ["datasource", "top"],
    "run": ["datasource", "run", "rank", "top"],
    "rank": ["datasource", "run", "rank"],
    "node": ["datasource", "instance", "gpu", "top"],
    "daemon": ["datasource", "instance", "top"],
}


def test_dashboards_are_these_and_their_uids_never_change() -> None:
    assert {path.stem: load(path)["uid"] for path in FILES} == {
        name: f"torchperfd-{name}" for name in VARIABLES
    }


def test_dashboard_can_be_provisioned_and_imported(dashboard: dict[str, Any]) -> None:
    assert 39 <= dashboard["schemaVersion"] <= 42
    # An input would have to be filled in, which provisioning does not do.
    assert dashboard["__inputs"] == []
    assert "id" not in dashboard
    needed = {(each["type"], each["id"]) for each in dashboard["__requires"]}
    assert needed == {("grafana", "grafana"), ("datasource", "prometheus")} | {
        ("panel", panel["type"]) for panel in panels(dashboard)
    }


def test_variables_cascade_and_ask_the_chosen_source(dashboard: dict[str, Any]) -> None:
    by_name = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    name = dashboard["uid"].removeprefix("torchperfd-")
    assert list(by_name) == VARIABLES[name]
    assert (by_name["datasource"]["type"], by_name["datasource"]["query"]) == ("datasource", "prometheus")
    asked = [variable for variable in by_name.values() if variable["type"] == "query"]
    assert all(variable["datasource"] == DATASOURCE for variable in asked)
    # Of two, the second one depends on the first.
    for before, after in itertools.pairwise(asked):
        assert f'"${before["name"]}"' in after["query"]


def addresses(dashboard: dict[str, Any]) -> list[str]:
    """Return the address of every link of a dashboard, its panels and its table cells."""
    found = [link["url"] for link in dashboard["links"]]
    for panel in panels(dashboard):
        settings = panel["fieldConfig"]
        found += [link["url"] for link in settings["defaults"].get("links") or ()]
        for override in settings["overrides"]:
            found += [
                link["url"]
                for each in override["properties"]
                if each["id"] == "links"
                for link in each["value"]
            ]
    return found


def test_links_keep_time_and_name_variables_that_exist(dashboard: dict[str, Any]) -> None:
    uids = {load(path)["uid"]: VARIABLES[path.stem] for path in FILES}
    assert {link["url"].removeprefix("/d/") for link in dashboard["links"]} == set(uids) - {dashboard["uid"]}
    assert all(link["keepTime"] and link["includeVars"] for link in dashboard["links"])
    own = {variable["name"] for variable in dashboard["templating"]["list"]}
    for url in addresses(dashboard):
        uid, _, query = url.removeprefix("/d/").partition("?")
        assert set(re.findall(r"var-(\w+)=", query)) <= set(uids[uid]), url
        assert not query or query.startswith("${__url_time_range}&${datasource:queryparam}"), url
        used = set(re.findall(r"\$\{(\w+)[:}]", query)) - {"__url_time_range"}
        assert used <= own, url


def test_dashboards_lead_from_fleet_to_rank_and_back() -> None:
    drill = {path.stem: {url.split("?")[0] for url in addresses(load(path)) if "?" in url} for path in FILES}
    for start, end in (
        *(("fleet", "run"), ("fleet", "node"), ("fleet", "daemon"), ("run", "rank"), ("run", "node")),
        *(("rank", "run"), ("rank", "node"), ("node", "rank"), ("node", "daemon"), ("daemon", "node")),
    ):
        assert f"/d/torchperfd-{end}" in drill[start], (start, end)


def every_panel(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels") or ()


def test_panel_ids_are_unique_and_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in every_panel(dashboard)]
    assert len(set(ids)) == len(ids)
    nested = [panel["panels"] for panel in dashboard["panels"] if panel.get("panels")]
    for together in (dashboard["panels"], *nested):
        taken: set[tuple[int, int]] = set()
        for panel in together:
            at = panel["gridPos"]
            assert at["x"] + at["w"] <= 24, panel["title"]
            cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
            assert not cells & taken, panel["title"]
            taken |= cells


def test_dashboard_has_no_gap_between_rows(dashboard: dict[str, Any]) -> None:
    bottom = 0
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        assert at["y"] <= bottom, panel["title"]
        bottom = max(bottom, at["y"] + at["h"])
    for row in dashboard["panels"]:
        if row.get("panels"):
            assert min(panel["gridPos"]["y"] for panel in row["panels"]) == row["gridPos"]["y"] + 1


def test_detail_is_in_collapsed_rows(dashboard: dict[str, Any]) -> None:
    rows = [panel for panel in dashboard["panels"] if panel["type"] == "row"]
    assert [row["title"] for row in rows if row["collapsed"] != bool(row["panels"])] == []
    assert any(row["collapsed"] for row in rows)
    assert not rows[0]["collapsed"]


def test_panels_of_many_series_are_bounded(dashboard: dict[str, Any]) -> None:
    """A label that grows with the fleet is in a legend only where topk or bottomk limits the series."""
    assert not any("repeat" in panel for panel in every_panel(dashboard))
    single = {variable["name"] for variable in dashboard["templating"]["list"] if not variable.get("multi")}
    for panel in panels(dashboard):
        for target in panel["targets"]:
            grown = set(re.findall(r"{{(run|rank|instance|gpu)}}", target["legendFormat"])) - single
            if grown and not target["expr"].startswith("1 - up") and "xid_last" not in target["expr"]:
                assert re.match(r"(topk|bottomk)\(\$top, ", target["expr"]), target["expr"]


def test_every_panel_says_what_it_shows_and_in_which_unit(dashboard: dict[str, Any]) -> None:
    titles = [panel["title"] for panel in panels(dashboard)]
    assert len(set(titles)) == len(titles)
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
            assert set(re.findall(r"\[([^\]]*)\]", expr)) <= {"$__rate_interval", "$__range"}, expr
            rated = re.findall(r"\b(?:rate|increase|irate)\((\w+)", expr)
            assert all(name.endswith(("_total", "_bucket")) for name in rated), expr
            assert expr.count("[") == len(rated), expr


def test_only_metrics_and_labels_of_the_daemon_are_asked_for(dashboard: dict[str, Any]) -> None:
    for query in all_queries(dashboard):
        assert not unknown(query.expr), query.name


def test_a_panel_about_gpus_says_that_it_may_be_empty(dashboard: dict[str, Any]) -> None:
    about_gpus = [query for query in all_queries(dashboard) if "torchperfd_gpu_" in query.expr]
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
