"""The tutorials: each page shows its scripts as they are, and each change gains what the page claims."""

import re
from pathlib import Path

import pytest
from tools import tutorials
from tools.tutorials import Tutorial, Workplace

MIN_RATIO = 1.15
"""Far below what the pages claim, so that a busy machine cannot fail the tests."""

CLEAR_RATIO = 1.6
"""A first round that shows this much is enough."""

each_tutorial = pytest.mark.parametrize("tutorial", tutorials.TUTORIALS, ids=lambda each: each.name)


def pattern_of(tutorial: Tutorial) -> str:
    """Return the regular expression of a page: its prose, code and commands, with any output."""
    pattern = ""
    for kind, options, text in tutorials.parts(tutorial.template):
        if kind == "prose":
            pattern += re.escape(text)
        elif kind == "start":
            pattern += re.escape(f"```console\n$ {text} &\n```")
        elif kind == "run":
            command = re.escape(text).replace("CAPTURE_ID", r"[0-9]{8}-[0-9]{6}-[0-9a-f]{6}")
            pattern += rf"```console\n\$ {command}\n(?:(?!```).+\n|\n)+```"
        elif kind == "measured":
            rows = [tutorial.quantity, " ".join(tutorial.before), " ".join(tutorial.after), "times as fast"]
            pattern += "(?:.*\n)*?".join(f".*{re.escape(row)}.*" for row in rows)
        else:
            pattern += re.escape(tutorials.excerpt(tutorial, kind, options))
    return pattern


@each_tutorial
def test_page_shows_its_template_and_scripts(tutorial: Tutorial) -> None:
    """If this fails, run ``python -m tools.tutorials NAME``."""
    assert re.fullmatch(pattern_of(tutorial), tutorial.page.read_text())


@each_tutorial
def test_page_claims_far_more_than_the_test_requires(tutorial: Tutorial) -> None:
    claimed = re.search(r"times as fast \| ([\d.]+) \|", tutorial.page.read_text())
    assert claimed is not None
    assert float(claimed[1]) >= tutorials.MIN_SHOWN_RATIO


def test_folders_of_pages_and_scripts_are_the_tutorials() -> None:
    names = {each.name for each in tutorials.TUTORIALS}
    assert {page.parent.name for page in tutorials.PAGES.glob("*/index.md")} == names
    assert {text.parent.name for text in tutorials.SCRIPTS.glob("*/text.txt")} == names


@pytest.mark.slow
@pytest.mark.serial
@each_tutorial
def test_change_of_a_tutorial_gains(tutorial: Tutorial, tmp_path: Path) -> None:
    place = Workplace(tutorial, tmp_path)
    gain = tutorials.measure(tutorial, place, rounds=3, enough_ratio=CLEAR_RATIO)
    assert gain.ratio >= MIN_RATIO
