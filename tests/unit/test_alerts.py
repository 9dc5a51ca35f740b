"""The alert rules: they say what an operator needs, and promtool sees them fire, stay quiet and resolve."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.metric_names import unknown

ALERTS = Path(__file__).resolve().parents[2] / "grafana" / "alerts"
RULES = ALERTS / "torchperfd.rules.yaml"
TESTS = ALERTS / "torchperfd.test.yaml"


def load(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return document


def alerts() -> list[dict[str, Any]]:
    return [rule for group in load(RULES)["groups"] for rule in group["rules"] if "alert" in rule]


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], cwd=ALERTS, capture_output=True, text=True, check=False)


@pytest.mark.needs("promtool")
def test_promtool_accepts_the_rules() -> None:
    check = promtool("check", "rules", RULES.name)
    assert check.returncode == 0, check.stderr


@pytest.mark.needs("promtool")
def test_promtool_sees_the_rules_do_what_they_promise() -> None:
    check = promtool("test", "rules", TESTS.name)
    assert check.returncode == 0, check.stdout + check.stderr


def test_every_alert_has_a_severity_and_a_runbook() -> None:
    for alert in alerts():
        assert alert["labels"]["severity"] in {"warning", "critical"}, alert["alert"]
        assert {"summary", "description", "runbook"} <= set(alert["annotations"]), alert["alert"]
        assert "{{ $labels.run }}" in alert["annotations"]["summary"], alert["alert"]


def test_every_alert_is_made_of_metrics_of_the_daemon() -> None:
    for alert in alerts():
        assert not unknown(alert["expr"]), alert["alert"]


def test_every_alert_is_seen_to_fire_and_to_stay_quiet() -> None:
    seen: dict[str, set[bool]] = {alert["alert"]: set() for alert in alerts()}
    for case in load(TESTS)["tests"]:
        for expectation in case["alert_rule_test"]:
            seen[expectation["alertname"]].add(bool(expectation["exp_alerts"]))
    assert seen == {name: {True, False} for name in seen}
