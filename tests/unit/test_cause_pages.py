"""Each cause of a verdict has a page that says what it means, how to confirm it and what to do."""

import re

import pytest
from tests.support.node import ROOT

from torchperfd_daemon.diagnosis.verdict import Cause

PAGES = ROOT / "docs" / "causes"
HEADINGS = ["Meaning", "How to confirm", "Fix"]


@pytest.mark.parametrize("cause", Cause)
def test_page_of_a_cause_has_its_title_and_headings(cause: Cause) -> None:
    page = (PAGES / f"{cause.slug}.md").read_text()
    assert page.splitlines()[0] == f"# {cause.value}"
    assert re.findall(r"^## (.*)", page, re.MULTILINE) == HEADINGS


@pytest.mark.parametrize("cause", Cause)
def test_page_of_a_cause_shows_its_verdict(cause: Cause) -> None:
    page = (PAGES / f"{cause.slug}.md").read_text()
    assert re.search(rf"^```\n{re.escape(cause.value)} · ", page, re.MULTILINE)


@pytest.mark.parametrize("cause", Cause)
def test_page_of_a_cause_has_something_in_each_part(cause: Cause) -> None:
    parts = re.split(r"^## .*\n", (PAGES / f"{cause.slug}.md").read_text(), flags=re.MULTILINE)[1:]
    assert all(len(part.split()) >= 20 for part in parts)


def test_pages_have_no_cause_that_does_not_exist() -> None:
    assert {page.stem for page in PAGES.glob("*.md")} == {cause.slug for cause in Cause}


def test_pages_of_causes_are_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    assert all(f"docs/causes/{cause.slug}.md" in menu for cause in Cause)
