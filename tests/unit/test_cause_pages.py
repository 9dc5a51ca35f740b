"""Each cause of a verdict has a page: what it is, how to confirm it, the fix and what to rule out."""

import re

import pytest
from grafana.rules import ALERTS
from tests.support.node import ROOT

from torchperfd_daemon.diagnosis.verdict import Cause

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
