"""Reference pages: each command, option, rule, route and cause has its section."""

import inspect
import re
from unittest.mock import MagicMock

import pytest
from grafana.rules import ALERTS
from tests.support.node import ROOT
from tools import reference

import torchperfd
from torchperfd import loggers
from torchperfd.steps.loop_rules import DECISIONS
from torchperfd_cli.main import COMMANDS
from torchperfd_daemon import errors
from torchperfd_daemon.analysis.advice import RULES
from torchperfd_daemon.config.kinds import Address
from torchperfd_daemon.config.options import OPTIONS
from torchperfd_daemon.diagnosis.verdict import Cause
from torchperfd_daemon.push.otlp_names import HARDWARE_NAMES
from torchperfd_daemon.web.api import Api


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return reference.pages()


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    return reference.sections()


def test_sections_each_stand_on_one_page(sections: dict[str, str]) -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert sorted(re.findall(r"<!-- generated: (.+?) -->\n", text)) == sorted(sections)


def test_section_of_commands_has_each_command(sections: dict[str, str]) -> None:
    assert all(f"### torchperfd {name}\n" in sections["commands"] for name in COMMANDS)


def test_table_of_commands_has_each_command() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    assert [name for name in COMMANDS if not re.search(rf"^\| `{name}\b", page, re.MULTILINE)] == []


def test_section_of_options_has_each_option_with_its_variable(sections: dict[str, str]) -> None:
    shown = [option for option in OPTIONS if not option.flag_only]
    assert shown
    for option in shown:
        assert f"| `{option.key}` | `{option.name}`, `{option.variable}` |" in sections["options"]


def test_page_of_verdicts_links_each_cause(pages: dict[str, str]) -> None:
    for cause in Cause:
        assert f"| [{cause.value}](../causes/{cause.slug}.md) |" in pages["verdicts.md"]


def test_section_of_loop_rules_has_each_rule(sections: dict[str, str]) -> None:
    rows = re.findall(r"^\| (?!held \|)", sections["loop rules"], re.MULTILINE)
    assert len(rows) == sum(len(decision.rules) for decision in DECISIONS)
    assert "\n| stepped, evaluated | always | release | nothing |\n" in sections["loop rules"]


def test_section_of_advice_has_each_rule(sections: dict[str, str]) -> None:
    for rule in RULES:
        conditions = "; ".join(each.text for each in rule.needs) or "none"
        assert f"\n| {rule.name} | {conditions} |\n" in sections["conditions of advice"]


def test_section_of_otlp_has_each_hardware_name(sections: dict[str, str]) -> None:
    section = sections["names over OTLP"]
    for name in HARDWARE_NAMES:
        (row,) = re.findall(rf"^\| `{name.family}(?:_total)?[{{`].*", section, re.MULTILINE)
        assert f"| `{name.name}` | {name.instrument.value}, `{name.unit}` |" in row
        assert all(attribute in row for attribute in (*name.constants, *name.labels.values()))


def test_page_of_commands_has_the_exit_code_of_each_error() -> None:
    found = [each for _, each in inspect.getmembers(errors, inspect.isclass) if hasattr(each, "exit_code")]
    assert len(found) > 5
    page = (ROOT / "docs" / "commands.md").read_text()
    assert all(f"\n| {error.exit_code} | " in page for error in found)


def test_page_of_python_has_each_public_name(pages: dict[str, str]) -> None:
    for module in (torchperfd, loggers):
        for name in module.__all__:
            if not name.startswith("__"):
                assert f"\n### {module.__name__}.{name}\n" in pages["python.md"]


def test_page_of_python_has_signatures_and_no_internals(pages: dict[str, str]) -> None:
    page = pages["python.md"]
    assert "phase(name: str) -> Phase\n" in page
    assert "    loggers: Iterable[Logger] = (),\n" in page
    assert "- `CaptureTimeoutError`: It did not end within `timeout` seconds." in page
    assert "become_inert" not in page
    assert "torchperfd.captures." not in page


def test_integrations_that_the_page_names_exist() -> None:
    from tests.unit.test_doc_examples import names_of

    for module, classes in reference.INTEGRATIONS.items():
        assert set(classes) <= names_of(module)


class RoutesOnly(Api):
    """The interface without anything behind its routes."""

    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> MagicMock:
        return MagicMock()


def test_each_route_of_the_http_api_is_documented() -> None:
    api = RoutesOnly()
    paths = [re.sub(r"\{(\w+):path\}", r"{\1}", route.path) for route in api.routes()]
    described = [path.removeprefix("/api/v1/") for path in paths if path.startswith("/api/v1/")]
    assert len(described) > 15
    page = (ROOT / "docs" / "http-api.md").read_text()
    assert [path for path in described if not re.search(rf"`{re.escape(path)}[`?]", page)] == []


def test_rules_of_advice_are_documented() -> None:
    page = (ROOT / "docs" / "advice.md").read_text().partition("## The rules")[2].partition("\n## ")[0]
    documented = {
        rule for names in re.findall(r"^\*\*(.*?)\.\*\*", page, re.MULTILINE) for rule in names.split(", ")
    }
    # The rule of the loader's workers has a variant of another name.
    rules = {rule.name for rule in RULES} | {"whole-batches"}
    assert len(rules) > 10
    assert documented == rules


def test_threat_model_names_code_and_tests_that_exist() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    named = {name.rstrip("/") for name in re.findall(r"`([\w/]+(?:\.py|\.tpl|\.yaml|/))`", page)}
    places = ("client/torchperfd", "daemon/torchperfd_daemon", "tests", "deploy/helm/torchperfd")
    missing = [name for name in named if not any(list((ROOT / place).rglob(name)) for place in places)]
    assert len(named) > 30
    assert missing == []


def test_page_of_ports_has_each_address_of_the_daemon() -> None:
    page = (ROOT / "docs" / "operating.md").read_text().partition("## Ports")[2]
    addresses = [option for option in OPTIONS if isinstance(option.kind, Address)]
    assert [option.key for option in addresses] == ["metrics_address", "fleet_address"]
    for option in addresses:
        assert option.name in page
        assert option.default is None or f"`{option.default}`" in page


PAGES = ROOT / "docs" / "causes"
HEADINGS = ["Symptom", "Confirm", "Fix", "Rule out"]


def parts_of(cause: Cause) -> list[str]:
    """Return the text below the title and below each heading."""
    return re.split(r"^##? .*\n", (PAGES / f"{cause.slug}.md").read_text(), flags=re.MULTILINE)[1:]


@pytest.mark.parametrize("cause", Cause)
def test_page_of_a_cause_has_its_title_and_headings(cause: Cause) -> None:
    page = (PAGES / f"{cause.slug}.md").read_text()
    assert page.splitlines()[0] == f"# {cause.value}"
    headings = re.findall(r"^## (.*)", page, re.MULTILINE)
    assert headings[: len(HEADINGS)] == HEADINGS
    alerts = {alert.name for alert in ALERTS if alert.page == f"causes/{cause.slug}"}
    assert sorted(headings[len(HEADINGS) :]) == sorted(alerts)


@pytest.mark.parametrize("cause", Cause)
def test_page_of_a_cause_begins_with_what_it_is(cause: Cause) -> None:
    first, symptom, *_ = parts_of(cause)
    assert 5 <= len(first.split()) <= 60
    assert re.search(rf"^```\n{re.escape(cause.value)} · ", symptom, re.MULTILINE)


@pytest.mark.parametrize("cause", Cause)
def test_page_of_a_cause_has_something_in_each_part(cause: Cause) -> None:
    assert all(len(part.split()) >= 5 for part in parts_of(cause))
    assert "Trade-off: " in parts_of(cause)[HEADINGS.index("Fix") + 1]


def test_pages_have_no_cause_that_does_not_exist() -> None:
    assert {page.stem for page in PAGES.glob("*.md")} == {cause.slug for cause in Cause}


def test_pages_of_causes_are_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    assert all(f"docs/causes/{cause.slug}.md" in menu for cause in Cause)


def test_symptoms_lead_to_each_cause() -> None:
    page = (ROOT / "docs" / "symptoms.md").read_text()
    assert [cause.value for cause in Cause if f"(causes/{cause.slug}.md)" not in page] == []
