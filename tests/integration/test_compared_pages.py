"""The pages of two captures, of two runs and of one run in a browser: opened from disk, read and used."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.browser import Browser
from tests.support.axe import serious_violations
from tests.support.page_documents import CAPTURES, HOSTILE, long_run, two_captures, two_runs

from torchperfd.report.store import RunStore
from torchperfd_cli import main

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium")]

PAGES = ("captures", "runs", "run")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one page of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    two_captures(folder / "captures", ranks=2)
    store = RunStore(str(folder / "runs"))
    for document in (*two_runs(), long_run()):
        store.keep(document)
    first, second = (str(folder / "captures" / each) for each in CAPTURES)
    runs = ("--runs-dir", store.directory)
    for name, arguments in (
        ("captures", ("compare", first, second)),
        ("runs", ("compare", "train-3", "slow", *runs)),
        ("run", ("runs", *runs, "show", "ddp")),
    ):
        assert main.run_command([*arguments, "--html", str(folder / f"{name}.html")]) == 0
    return folder


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


def opened(browser: Browser, page: Path, fragment: str = "", width: int = 1200) -> Browser:
    browser.complaints.clear()
    browser.look_like(width)
    # From the page itself, another fragment would load nothing.
    browser.visit("about:blank")
    browser.requests.clear()
    browser.visit(f"{page.as_uri()}#{fragment}")
    return browser


def column(browser: Browser, table: str, number: int) -> list[str]:
    return browser.texts(f"table[aria-label={json.dumps(table)}] tbody tr > :nth-child({number})")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_break_no_serious_rule_of_axe(chromium: Browser, folder: Path, scheme: str) -> None:
    for name in PAGES:
        opened(chromium, folder / f"{name}.html")
        chromium.look_like(1200, scheme=scheme)
        chromium.drawn()
        assert serious_violations(chromium) == [], name


SENTENCES = {
    "captures": "B's steps take 3.9 ms, A's 2.9 ms (+34 %): +998 µs in void gemm<float>().",
    "runs": "Step time 20.",
    "run": "Slow rank · rank 3 on gpu-17 · 16% of the step.",
}


@pytest.mark.parametrize("name", PAGES)
def test_page_opens_from_disk_with_its_sentence(chromium: Browser, folder: Path, name: str) -> None:
    browser = opened(chromium, folder / f"{name}.html")
    (sentence,) = browser.texts("main > .verdict")
    assert sentence.startswith(SENTENCES[name])
    assert (browser.complaints, browser.requests) == ([], [(folder / f"{name}.html").as_uri()])
    assert browser.run("document.images.length") == 0
    assert HOSTILE in browser.run("document.body.innerText")
    assert "undefined" not in browser.run("document.body.innerText")
    assert "NaN" not in browser.run("document.body.innerText")
    assert browser.texts("title")[0].endswith(" · torchperfd")


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [380, 1200])
def test_page_fits_the_window(chromium: Browser, folder: Path, name: str, width: int) -> None:
    browser = opened(chromium, folder / f"{name}.html", width=width)
    assert browser.run("document.documentElement.scrollWidth") == width


def test_captures_page_shows_both_sides_and_what_differs(chromium: Browser, folder: Path) -> None:
    browser = opened(chromium, folder / "captures.html")
    sides = dict(
        zip(column(browser, "What is compared", 1), column(browser, "What is compared", 2), strict=True)
    )
    assert (sides["run"], sides["ranks"]) == ("bert-17", "2 of 2")
    assert sides["recorded"] == "2023-11-14 22:13:20 UTC"
    assert column(browser, "Ranks", 1) == ["rank 0", "rank 1"]
    assert set(column(browser, "Phases", 6)) == {"changed", "within noise"}
    assert "p < 0.001" in column(browser, "Phases", 7)
    assert column(browser, "Operators", 1)[0] == "aten::mm"
    assert column(browser, "Operators", 4)[0] == "+0.998"


def test_captures_page_rows_are_added_filtered_and_kept(chromium: Browser, folder: Path) -> None:
    page = folder / "captures.html"
    browser = opened(chromium, page)
    before = column(browser, "Operators", 1)
    assert len(before) == 3
    browser.click("input[id='all operators']")
    assert len(column(browser, "Operators", 1)) == 13
    browser.run("document.querySelector('[aria-label=\"Filter Operators\"]').focus()")
    for letter in "OP3":
        browser.press(letter)
    assert column(browser, "Operators", 1) == ["aten::op3"]
    fragment = browser.run("location.hash.slice(1)")
    browser = opened(browser, page, fragment)
    assert column(browser, "Operators", 1) == ["aten::op3"]
    assert browser.complaints == []


def test_runs_page_shows_phases_with_intervals(chromium: Browser, folder: Path) -> None:
    browser = opened(chromium, folder / "runs.html")
    assert browser.texts(".findings li")[0].startswith("backward changed by +")
    assert column(browser, "Phases", 1)[:2] == ["the whole step", "backward"]
    assert column(browser, "Phases", 7)[1] == "changed"
    assert set(column(browser, "Phases", 7)[2:]) == {"within noise"}
    labels = "[...document.querySelectorAll('.interval')].map((each) => each.getAttribute('aria-label'))"
    assert all(label.endswith("of the step") for label in browser.run(labels))
    assert column(browser, "Environment", 1) == ["torch"]


def test_run_page_shows_ranks_phases_and_environment(chromium: Browser, folder: Path) -> None:
    browser = opened(chromium, folder / "run.html")
    assert browser.texts(".cause h3") == ["✗ slow rank · rank 3 on gpu-17 · 16% of the step"]
    assert browser.texts(".part")[0].startswith("note")
    assert column(browser, "Where a step goes", 1)[:2] == [
        "waiting for ranks whose work differs from step to step",
        "forward",
    ]
    assert column(browser, "Where a step goes", 3)[-1] == "beside the step, costs nothing"
    # The rank with most work of its own comes first.
    assert column(browser, "Across ranks", 1)[0] == "3"
    assert "validation 1% of the time" in browser.texts(".findings li")[0]
    assert {"fit", "validate", "backward"} <= set(column(browser, "Phases of rank 3", 2))
    browser.run("document.getElementById('rank').focus()")
    browser.press("ArrowDown")
    browser = opened(browser, folder / "run.html", browser.run("location.hash.slice(1)"))
    assert browser.texts("table[aria-label='Phases of rank 0'] th")[0] == "Phase"
    assert "NVIDIA H100 80GB HBM3" in column(browser, "Environment", 2)
    assert browser.complaints == []


def test_pages_are_read_in_the_dark_and_printed(chromium: Browser, folder: Path) -> None:
    for name in PAGES:
        browser = opened(chromium, folder / f"{name}.html")
        background = "getComputedStyle(document.body).backgroundColor"
        light = browser.run(background)
        browser.look_like(1200, scheme="dark")
        browser.drawn()
        assert browser.run(background) != light
        assert browser.printed().startswith(b"%PDF")
