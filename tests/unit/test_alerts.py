"""The rules: promtool sees every alert fire and be silent, and each has a page that helps."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana import config
from grafana.alerting import Alert, Case, Firing, RuleError, check, rules_text
from grafana.cases import CASES, RECORDED
from grafana.rules import ALERTS, RECORDINGS
from tests.metric_names import unknown

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "grafana" / "alerts"
RULES = FOLDER / "torchperfd.rules.yaml"
TESTS = FOLDER / "torchperfd.test.yaml"
DOCS = ROOT / "docs"
RUNBOOKS = [DOCS / "runbooks.md", *sorted((DOCS / "causes").glob("*.md"))]
RECORDED_NAME = re.compile(r"\w+:torchperfd_\w+:\w+")


def load(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return document


def rules(kind: str) -> list[dict[str, Any]]:
    return [rule for group in load(RULES)["groups"] for rule in group["rules"] if kind in rule]


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)


@pytest.mark.needs("promtool")
def test_promtool_accepts_the_rules() -> None:
    done = promtool("check", "rules", RULES.name)
    assert done.returncode == 0, done.stderr


@pytest.mark.needs("promtool")
def test_promtool_sees_alerts_fire_and_be_silent() -> None:
    done = promtool("test", "rules", TESTS.name)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", rules("alert"), ids=lambda alert: alert["alert"])
def test_alert_has_severity_texts_and_a_runbook(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in {"warning", "critical"}
    annotations = alert["annotations"]
    assert set(annotations) == {"summary", "description", "runbook"}
    # The label that an operator needs first is in the one line that a pager shows.
    assert re.search(r"\{\{ \$labels\.(run|instance|job) \}\}", annotations["summary"])
    page, _, anchor = annotations["runbook"].partition(".md#")
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {alert['alert']}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    assert re.search(r"^\w.*?^- ", section[1], re.MULTILINE | re.DOTALL), "a meaning, then what to do"
    assert anchor == alert["alert"].lower()


def test_address_of_runbooks_makes_a_url_of_each_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "RUNBOOKS", "https://site/docs")
    with_address = yaml.safe_load(rules_text([], ALERTS))["groups"][1]["rules"]
    urls = [rule["annotations"].pop("runbook_url") for rule in with_address]
    pages = [rule["annotations"].pop("runbook") for rule in rules("alert")]
    assert urls == [f"https://site/docs/{page.replace('.md#', '.html#')}" for page in pages]


RESERVED = re.compile(
    r"https?://(?:[\w.-]+\.)?(?:example\.(?:com|org|net)|[\w-]+\.(?:example|invalid))\b|\bOWNER/NAME\b"
)


def test_nothing_to_copy_names_an_address_that_cannot_exist() -> None:
    pages = [
        *(ROOT / name for name in ("README.md", "SECURITY.md", "grafana/README.md")),
        *DOCS.rglob("*.md"),
        *(path for path in (ROOT / "deploy").rglob("*") if path.is_file()),
        *(ROOT / "grafana").rglob("*.yaml"),
        *(ROOT / "grafana").rglob("*.json"),
    ]
    assert len(pages) > 100
    named = {path.relative_to(ROOT): RESERVED.findall(path.read_text(encoding="utf-8")) for path in pages}
    assert {path: found for path, found in named.items() if found} == {}


def test_runbooks_each_belong_to_an_alert() -> None:
    sections = [
        (path.relative_to(DOCS).with_suffix("").as_posix(), name)
        for path in RUNBOOKS
        for name in re.findall(r"^## (Torchperfd\w+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert sorted(sections) == sorted((alert.page, alert.name) for alert in ALERTS)


def test_page_of_runbooks_lists_each_alert() -> None:
    page = (DOCS / "runbooks.md").read_text(encoding="utf-8")
    elsewhere = {alert for alert in ALERTS if alert.page != "runbooks"}
    assert [
        alert.name for alert in elsewhere if f"({alert.page}.md#{alert.name.lower()}) |" not in page
    ] == []


def test_runbooks_name_panels_and_rows_that_exist() -> None:
    titles: dict[str, set[str]] = {}
    for path in (ROOT / "grafana" / "dashboards").glob("*.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        shown = [each for panel in document["panels"] for each in (panel, *(panel.get("panels") or ()))]
        titles[document["title"].removeprefix("torchperfd: ")] = {panel["title"] for panel in shown}
    named = [
        (title, dashboard)
        for path in RUNBOOKS
        for title, dashboard in re.findall(
            r"(?:panel|row) \*([^*]+)\*\s+of\s+the\s+dashboard\s+\*([^*]+)\*",
            path.read_text(encoding="utf-8"),
        )
    ]
    assert len(named) > 5
    assert [
        each for each in named if " ".join(each[0].split()) not in titles[" ".join(each[1].split())]
    ] == []


def test_rules_are_made_of_metrics_of_the_daemon() -> None:
    recorded = {rule.record for rule in RECORDINGS}
    for rule in [*rules("alert"), *rules("record")]:
        assert set(RECORDED_NAME.findall(rule["expr"])) <= recorded
        assert not unknown(RECORDED_NAME.sub("", rule["expr"])), rule


def test_limits_of_the_table_are_those_of_the_rules() -> None:
    for rule in rules("alert"):
        limit = config.LIMITS[rule["alert"]]
        assert (rule["for"], rule["labels"]["severity"]) == (limit.hold, limit.severity)
        assert re.search(rf"[<>] {limit.threshold:g}([\s)]|$)", rule["expr"]), rule["expr"]


ALERT = Alert("TorchperfdRunHang", "a > {threshold}", "s", "d", "page")
FIRES = Case("TorchperfdRunHang", "fires", {}, {"1m": (Firing({}),)})
SILENT = Case("TorchperfdRunHang", "silent", {}, {"1m": ()})


@pytest.mark.parametrize(
    ("alert", "cases", "problem"),
    [
        (replace(ALERT, page=""), [FIRES, SILENT], "no runbook"),
        (ALERT, [SILENT], "no case in which it fires"),
        (ALERT, [FIRES], "no case in which it is silent"),
        (replace(ALERT, name="Unheard"), [], "no limit"),
    ],
)
def test_incomplete_alert_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, alert: Alert, cases: list[Case], problem: str
) -> None:
    monkeypatch.setattr(config, "LIMITS", {ALERT.name: config.Limit(0, "1m")})
    with pytest.raises(RuleError, match=problem):
        check([alert], cases)


def test_recording_rule_without_a_test_cannot_be_built() -> None:
    with pytest.raises(RuleError, match="no test of its values"):
        check(ALERTS, CASES, RECORDINGS, [])


def test_complete_alerts_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    check(ALERTS, CASES, RECORDINGS, RECORDED)
    monkeypatch.setattr(config, "LIMITS", {ALERT.name: config.Limit(0, "1m")})
    check([ALERT], [FIRES, SILENT])
