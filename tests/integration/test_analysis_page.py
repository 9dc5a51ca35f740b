"""The page of ``analyze --html`` in a browser: what it shows, how it answers, what it asks for."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.browser import Browser
from tests.support.axe import serious_violations
from tests.support.golden import check_golden
from tests.unit.daemon.traces import event, trace_of

from torchperfd_daemon import analysis

HOSTILE = '</script><script>document.title="owned"</script><img src=x onerror="document.title=1">'
CANVAS = ".timeline canvas"

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium")]


def events_of(rank: int) -> list[str]:
    """Two steps of 1 ms: operators on two threads and kernels on one stream; rank 1 has one kernel more."""
    made = []
    for step in range(2):
        at = 1_000_000 * step
        made += [
            event(f"ProfilerStep#{step + 5}", at, at + 990_000, cat="user_annotation"),
            event("aten::linear", at + 100_000, at + 400_000),
            event("aten::addmm", at + 150_000, at + 350_000),
            event(HOSTILE, at + 500_000, at + 700_000, thread=2),
            event(
                "cudaLaunchKernel", at + 200_000, at + 210_000, cat="cuda_runtime", args={"correlation": 9}
            ),
            event("gemm", at + 300_000, at + 650_000, cat="kernel", thread=7, args={"correlation": 9}),
            event("ncclDevKernel", at + 600_000, at + 800_000, cat="kernel", thread=8),
        ]
    return made + ([event("late", 1_800_000, 1_900_000, cat="kernel", thread=7)] if rank else [])


def document_of(events: list[str], rank: int | None) -> tuple[dict[str, Any], Any]:
    trace = trace_of(events)
    summary = analysis.summarise(trace, rectangles=1000)
    kept = ("rank", "trace", "process", "quality", "breakdown", "kernels", "steps", "group_by", "operators")
    full = analysis.to_dict(summary, rank)
    entry = {key: full[key] for key in kept} | {
        "idle": [
            {
                "cause": "launch",
                "idle_us": 620.5,
                "gaps": 3,
                "places": [{"what": "aten::linear", "idle_us": 620.5}],
            },
            {"cause": "other", "idle_us": 0.0, "gaps": 0, "places": []},
        ]
    }
    entry["trace"] |= {"path": f"/captures/one/rank{rank}.json", "bytes": 12_345}
    for step in entry["steps"]:
        step.pop("idle", None)
        step["phases"] = {"forward_us": 300.0, "other_us": step["duration_us"] - 300}
    return entry, summary.picture


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entries, pictures = zip(*(document_of(events_of(rank), rank) for rank in (0, 1)), strict=True)
    shown = {
        "schema": analysis.SCHEMA,
        "capture": {
            "capture_id": "one",
            "run": "bert-17",
            "job": "train.py",
            "trigger": "command",
            "requested_at": 1_700_000_000.0,
            "world_size": 3,
            "steps": [5, 7],
            "nodes": ["node-a"],
            "torch_versions": ["2.13.0"],
            "python_versions": ["3.11.7"],
            "torchperfd_versions": [],
        },
        "advice": [
            {
                "rule": "host-bound",
                "ranks": [0, 1],
                "evidence": f"the device idles because of {HOSTILE}",
                "saves_us_per_step": 310.0,
                "share_of_step": 0.31,
                "change": "take Python out of the step",
                "setting": "model = torch.compile(model)",
            }
        ],
        "ranks": list(entries),
        "across": {
            "verdict": "rank 1 keeps the others waiting: last at 4 of 4 collectives",
            "found": "4 collectives found on several of 2 ranks, no trace of rank 2",
            "caveats": ["rank 1's clock is 2.000 ms ahead of rank 0's"],
            "matched": 4,
            "missing": [2],
            "ranks": [{"rank": 0, "wait_us": 1.5}, {"rank": 1, "wait_us": 0.5}],
        },
        "failed": [{"rank": 2, "error": "rank2.json is empty"}],
    }
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(analysis.render_html(shown, pictures))
    return file


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser, page: Path) -> Browser:
    """A browser that has just opened the page, and must have had nothing to complain about at the end."""
    chromium.complaints.clear()
    chromium.requests.clear()
    chromium.look_like(1200)
    chromium.open(page)
    return chromium


def column(browser: Browser, table: str, number: int) -> list[str]:
    return browser.texts(f"table[aria-label={table}] tbody td:nth-child({number})")


def write(browser: Browser, label: str, text: str) -> None:
    """Put the cursor into a field and type."""
    browser.run(f"document.querySelector('[aria-label={json.dumps(label)}]').focus()")
    for character in text:
        browser.press(character)


def test_page_shows_all_requests_nothing_and_runs_no_name(browser: Browser, page: Path) -> None:
    shown = browser.run("document.getElementById('report').innerText")
    text = "".join(f"{line.strip()}\n" for line in shown.splitlines() if line.strip())
    check_golden("analyze_page.txt", text)
    assert browser.run("document.title") == "bert-17: one, 2 ranks · torchperfd"
    assert browser.run("document.images.length") == 0
    assert browser.complaints == []
    assert browser.requests == [page.as_uri()]


def test_the_policy_stops_script_that_is_not_the_pages_own(browser: Browser) -> None:
    browser.run(
        "const foreign = document.createElement('script');"
        "foreign.textContent = 'window.ran = 1';"
        "document.body.append(foreign)"
    )
    assert browser.run("window.ran") is None
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)


def test_a_table_sorts_by_the_column_that_is_clicked(browser: Browser) -> None:
    head = "table[aria-label=Operators] th:nth-child(2)"
    for order, reverse in (("descending", True), ("ascending", False)):
        browser.click(f"{head} button")
        assert browser.run(f"document.querySelector('{head}').ariaSort") == order
        calls = [int(text) for text in column(browser, "Operators", 2)]
        assert calls == sorted(calls, reverse=reverse)
    assert browser.texts("table[aria-label=Operators] th[aria-sort=ascending]") == ["calls"]
    browser.click("table[aria-label=Operators] th:nth-child(1) button")
    names = column(browser, "Operators", 1)
    assert names == sorted(names)


def test_a_table_filters_by_text(browser: Browser) -> None:
    before = len(column(browser, "Operators", 1))
    write(browser, "Filter Operators", "ATEN")
    assert sorted(column(browser, "Operators", 1)) == ["aten::addmm", "aten::linear"]
    assert f"2 of {before} rows" in browser.texts("section .row span")


def said(browser: Browser) -> str:
    return browser.texts(".timeline + .said")[0]


def click_timeline(browser: Browser, share: float, y: float) -> None:
    """Click at a share of the timeline's width, at a height in it."""
    browser.run(f"document.querySelector('{CANVAS}').scrollIntoView({{block: 'center'}})")
    left, top, width = browser.run(
        f"(({{x, y, width}}) => [x, y, width])(document.querySelector('{CANVAS}').getBoundingClientRect())"
    )
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        browser.mouse(kind, left + share * width, top + y)
    browser.drawn()


def test_the_timeline_is_read_with_the_mouse_and_with_keys(browser: Browser) -> None:
    # The lane of the first thread: an axis of 24 px, a heading of 20, and rows of 17. 1.99 ms are recorded.
    step, linear, addmm = (24 + 20 + 17 * level + 8 for level in range(3))
    click_timeline(browser, 0.2 / 1.99, linear)
    assert said(browser).startswith("aten::linear\n300 µs, from 100 µs")
    click_timeline(browser, 1.25 / 1.99, addmm)
    assert said(browser).startswith("aten::addmm\n200 µs, from 1.15 ms")
    click_timeline(browser, 0.5 / 1.99, linear)
    assert said(browser) == ""
    for _ in range(6):
        browser.press("ArrowLeft")
    for _ in range(3):
        browser.press("+")
    browser.press("ArrowLeft")
    for _ in range(9):
        browser.press("ArrowLeft")
    # Zoomed to a fifth of the whole and moved to its beginning, the middle is in the first step.
    browser.press("Enter")
    assert said(browser).startswith("ProfilerStep#5")
    click_timeline(browser, 0.5, addmm)
    assert said(browser).startswith("aten::addmm\n200 µs, from 150 µs")
    browser.press("0")
    click_timeline(browser, 1.5 / 1.99, step)
    assert said(browser).startswith("ProfilerStep#6")


def test_the_timeline_is_dragged_and_zoomed_with_the_wheel(browser: Browser) -> None:
    step = 24 + 20 + 8
    click_timeline(browser, 0.75, step)
    assert said(browser).startswith("ProfilerStep#6")
    left, top, width = browser.run(
        f"(({{x, y, width}}) => [x, y, width])(document.querySelector('{CANVAS}').getBoundingClientRect())"
    )
    browser.mouse("mouseWheel", left + width / 4, top + step, deltaX=0, deltaY=-200, modifiers=2)
    browser.drawn()
    click_timeline(browser, 0.75, step)
    assert said(browser).startswith("ProfilerStep#5")
    browser.mouse("mousePressed", left + 0.9 * width, top + step)
    browser.mouse("mouseMoved", left + 0.1 * width, top + step, buttons=1)
    browser.mouse("mouseReleased", left + 0.1 * width, top + step)
    browser.drawn()
    click_timeline(browser, 0.75, step)
    assert said(browser).startswith("ProfilerStep#6")


def focused(browser: Browser) -> str:
    text: str = browser.run("document.activeElement.textContent")
    return text


def test_the_flame_graph_zooms_and_is_walked_with_keys(browser: Browser) -> None:
    assert browser.texts(".flame button")[:3] == ["main thread 1", "thread 2", HOSTILE]
    browser.run(
        "[...document.querySelectorAll('.flame button')]"
        ".find((each) => each.textContent === 'aten::linear').click()"
    )
    browser.drawn()
    assert browser.texts(".flame button.above") == ["main thread 1", "ProfilerStep*"]
    assert browser.texts(".flame button:not(.above)")[:2] == ["aten::linear", "aten::addmm"]
    assert focused(browser) == "aten::linear"
    browser.press("ArrowDown")
    assert focused(browser) == "aten::addmm"
    assert browser.texts(".flame + .said")[0].startswith("aten::addmm\n400 µs")
    for key in ("ArrowUp", "ArrowUp", "ArrowUp"):
        browser.press(key)
    assert focused(browser) == "main thread 1"
    browser.press("Escape")
    assert browser.texts(".flame button.above") == []
    write(browser, "Find in the flame graph", "addmm")
    assert browser.texts(".flame button.found") == ["aten::addmm"]


def test_another_rank_is_shown_by_choosing_it(browser: Browser) -> None:
    assert "late" not in column(browser, "Kernels", 1)
    browser.run("document.getElementById('rank').focus()")
    browser.press("ArrowDown")
    assert "late" in column(browser, "Kernels", 1)
    assert "/captures/one/rank1.json" in browser.texts("main > p.soft")


def test_page_follows_colour_scheme_and_prints_without_controls(browser: Browser) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    pixel = f"document.querySelector('{CANVAS}').toDataURL()"
    light = browser.run(background), browser.run(pixel)
    browser.look_like(1200, scheme="dark")
    browser.drawn()
    dark = browser.run(background), browser.run(pixel)
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    browser.look_like(1200, media="print")
    browser.drawn()
    hidden = "[...document.querySelectorAll('select, input, .more')].every((each) => !each.offsetParent)"
    assert browser.run(hidden) is True
    assert browser.run("document.querySelector('table[aria-label=Operators]').offsetHeight") > 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_breaks_no_serious_rule_of_axe(browser: Browser, one_step: Path, scheme: str) -> None:
    browser.look_like(1200, scheme=scheme)
    browser.drawn()
    assert serious_violations(browser) == []
    browser.open(one_step)
    assert serious_violations(browser) == []


@pytest.mark.parametrize("width", [360, 800, 1900])
def test_it_fits_any_window(browser: Browser, width: int) -> None:
    browser.look_like(width)
    browser.drawn()
    assert browser.run("document.documentElement.scrollWidth") == width


def test_a_trace_of_which_little_is_known_has_a_page_too(chromium: Browser, tmp_path: Path) -> None:
    entry, picture = document_of([event("alone", 0, 1000)], None)
    file = tmp_path / "page.html"
    shown = {"schema": analysis.SCHEMA, "ranks": [entry], "failed": []}
    file.write_text(analysis.render_html(shown, [picture]))
    chromium.complaints.clear()
    chromium.look_like(1200)
    chromium.open(file)
    assert "There are no steps" in chromium.run("document.body.innerText")
    assert chromium.complaints == []


@pytest.fixture(scope="module")
def slow_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page on which rank 1 is the slow one, with Python frames of the script and of libraries."""
    frames = [
        event("train.py(3): main", 0, 900_000, cat="python_function"),
        event("torch/nn/modules/module.py(9): _call_impl", 100_000, 800_000, cat="python_function"),
        event("model.py(7): forward", 150_000, 700_000, cat="python_function"),
        event("<built-in method linear>", 200_000, 600_000, cat="python_function"),
        event("aten::linear", 250_000, 500_000),
    ]
    entries, pictures = zip(
        *(document_of(events_of(rank) if rank == 0 else frames, rank) for rank in (0, 1)), strict=True
    )
    across = {"verdict": "rank 1 keeps the others waiting", "found": "", "slowest": 1, "ranks": []}
    shown = {"schema": analysis.SCHEMA, "ranks": list(entries), "across": across, "failed": []}
    file = tmp_path_factory.mktemp("slow") / "page.html"
    file.write_text(analysis.render_html(shown, pictures))
    return file


def opened(browser: Browser, page: Path, fragment: str = "") -> Browser:
    browser.complaints.clear()
    browser.look_like(1200)
    # From the page itself, another fragment would load nothing.
    browser.visit("about:blank")
    browser.visit(f"{page.as_uri()}#{fragment}")
    return browser


def chosen_rank(browser: Browser) -> str:
    name: str = browser.run("(({value, options}) => options[value].text)(document.getElementById('rank'))")
    return name


def test_page_opens_on_the_rank_that_is_slow(chromium: Browser, slow_rank: Path) -> None:
    browser = opened(chromium, slow_rank)
    assert browser.texts("main > .verdict") == ["Rank 1 keeps the others waiting."]
    assert chosen_rank(browser) == "rank 1"
    assert "/captures/one/rank1.json" in browser.texts("main > p.soft")


def test_page_without_a_slow_rank_opens_on_the_first(browser: Browser) -> None:
    assert chosen_rank(browser) == "rank 0"


def test_frames_of_libraries_are_hidden_until_asked_for(chromium: Browser, slow_rank: Path) -> None:
    browser = opened(chromium, slow_rank)
    own = ["thread 1", "train.py(3): main", "model.py(7): forward", "aten::linear"]
    assert browser.texts(".flame button") == own
    browser.run("document.getElementById('library').click()")
    browser.drawn()
    shown = browser.texts(".flame button")
    assert set(shown) - set(own) == {"torch/nn/modules/module.py(9): _call_impl", "<built-in method linear>"}
    assert opened(browser, slow_rank, browser.run("location.hash.slice(1)")).complaints == []
    assert browser.texts(".flame button") == shown


def test_address_keeps_rank_order_filter_and_part(chromium: Browser, page: Path) -> None:
    browser = opened(chromium, page)
    browser.run("document.getElementById('rank').focus()")
    browser.press("ArrowDown")
    browser.click("table[aria-label=Operators] th:nth-child(2) button")
    browser.click("table[aria-label=Operators] th:nth-child(2) button")
    write(browser, "Find in the flame graph", "addmm")
    browser.run(f"document.querySelector('{CANVAS}').focus()")
    browser.press("+")
    address = browser.run("location.hash.slice(1)")
    pixels = f"document.querySelector('{CANVAS}').toDataURL()"
    before = browser.run(pixels)
    browser = opened(browser, page, address)
    assert chosen_rank(browser) == "rank 1"
    assert browser.texts("table[aria-label=Operators] th[aria-sort=ascending]") == ["calls"]
    assert browser.texts(".flame button.found") == ["aten::addmm"]
    browser.run(f"document.querySelector('{CANVAS}').focus()")
    assert browser.run(pixels) == before
    assert browser.run("location.hash.slice(1)") == address
    assert browser.complaints == []


@pytest.mark.parametrize("fragment", ["rank=7", "part=5-1", "part=x", "sort+Operators=none", "%E0%A4%A"])
def test_damaged_address_shows_the_page_as_without(chromium: Browser, page: Path, fragment: str) -> None:
    browser = opened(chromium, page, fragment)
    assert chosen_rank(browser) == "rank 0"
    assert browser.texts(".timeline canvas")
    assert browser.complaints == []


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of one step of 1 ms, with an operator, its launch and its kernel."""
    events = [
        event("ProfilerStep#5", 0, 1_000_000, cat="user_annotation"),
        event("aten::linear", 100_000, 400_000, args={"Input Dims": [[64, 128], [128, 256]]}),
        event("cudaLaunchKernel", 200_000, 300_000, cat="cuda_runtime", args={"correlation": 9}),
        event("gemm", 600_000, 900_000, cat="kernel", thread=7, args={"correlation": 9}),
    ]
    entry, picture = document_of(events, 0)
    file = tmp_path_factory.mktemp("step") / "page.html"
    file.write_text(
        analysis.render_html({"schema": analysis.SCHEMA, "ranks": [entry], "failed": []}, [picture])
    )
    return file


STEP_CANVAS = "section[aria-label='Step 5 in full'] canvas"


def click_step(browser: Browser, share: float, y: float) -> str:
    """Click into the timeline of one step; return the description."""
    browser.run(f'document.querySelector("{STEP_CANVAS}").scrollIntoView({{block: "center"}})')
    box = f'document.querySelector("{STEP_CANVAS}").getBoundingClientRect()'
    left, top, width = browser.run(f"(({{x, y, width}}) => [x, y, width])({box})")
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        browser.mouse(kind, left + share * width, top + y)
    browser.drawn()
    return browser.texts("section[aria-label='Step 5 in full'] .said")[0]


def test_step_in_full_shows_inputs_and_the_other_end(chromium: Browser, one_step: Path) -> None:
    browser = opened(chromium, one_step)
    # The lane of the thread: an axis of 24 px, a heading of 20, and rows of 17; then that of the stream.
    linear, launch, kernel = 24 + 20 + 17 + 8, 24 + 20 + 34 + 8, 24 + 20 + 3 * 17 + 6 + 20 + 8
    assert "inputs [[64, 128], [128, 256]]".replace(" ", "") in click_step(browser, 0.15, linear).replace(
        " ", ""
    )
    assert "launches gemm, which starts 400 µs later" in click_step(browser, 0.25, launch)
    assert "launched by cudaLaunchKernel, 400 µs earlier" in click_step(browser, 0.75, kernel)
    assert browser.complaints == []


def test_step_in_full_is_searched_by_name(chromium: Browser, one_step: Path) -> None:
    browser = opened(chromium, one_step)
    pixels = f'document.querySelector("{STEP_CANVAS}").toDataURL()'
    before = browser.run(pixels)
    write(browser, "Find in the step", "gemm")
    browser.drawn()
    found = browser.run(pixels)
    assert found != before
    browser = opened(browser, one_step, browser.run("location.hash.slice(1)"))
    assert browser.run("document.querySelector(\"[aria-label='Find in the step']\").value") == "gemm"
    assert browser.run(pixels) == found
