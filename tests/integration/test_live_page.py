"""The live page in a browser: what a person sees and does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.browser import Browser
from tests.support.axe import serious_violations
from tests.support.node import eventually
from tests.support.page_feed import HOSTILE_RUN, PageFeed
from tests.support.page_server import TOKEN, serve_page

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium")]

VIEWS = ("#/", "#/run/demo", "#/rank/demo/5", "#/captures", "#/node")
MAIN = "document.getElementById('view').innerText"
BANNER = "document.getElementById('banner').innerText"
SCOPE = "document.getElementById('scope').innerText"
OUTCOME = "document.querySelector('.outcome').innerText"
BUTTONS = "document.querySelectorAll('.title-row button').length"
NEWEST_STEP = (
    "Number(/Steps \\d+\\u2013(\\d+)/.exec(document.querySelector('#stream .note').textContent)?.[1] ?? NaN)"
)

# What a screen reader needs, and contrast; returns what is wrong.
CHECKED = """(() => {
  const wrong = [];
  const shown = (each) => each.checkVisibility();
  const named_ones = 'button, a, input, canvas, section, [role=img], [role=region]';
  for (const each of document.querySelectorAll(named_ones)) {
    const texts = [each.getAttribute('aria-label'), each.textContent.trim(), each.labels?.[0]?.textContent];
    const named = texts.some(Boolean);
    if (shown(each) && !named) wrong.push('no name: ' + each.outerHTML.slice(0, 90));
  }
  const headless = (each) => wrong.push('no scope: ' + each.textContent);
  for (const cell of document.querySelectorAll('th')) if (!cell.scope) headless(cell);
  for (const id of [...document.querySelectorAll('[id]')].map((each) => each.id))
    if (document.querySelectorAll('#' + CSS.escape(id)).length > 1) wrong.push('twice: ' + id);
  if (document.querySelectorAll('h1').length !== 1) wrong.push('not one h1');
  if (document.querySelectorAll('main').length !== 1) wrong.push('not one main');
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => {
    const [r, g, b] = channels(text).slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (each) => {
    for (let at = each; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if ((channels(colour)[3] ?? 1) > 0.99) return colour;
    }
    return 'rgb(255 255 255)';
  };
  for (const each of document.querySelectorAll('body *')) {
    const own = [...each.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !shown(each) || each.disabled || each.closest('.skip, .unseen, script, noscript')) continue;
    const [a, b] = [light(getComputedStyle(each).color), light(behind(each))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) wrong.push('contrast: ' + each.outerHTML.slice(0, 90));
  }
  return wrong;
})()"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with Browser(online=True) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    chromium.visit("about:blank")
    chromium.look_like(1280)
    for list_ in (chromium.complaints, chromium.failures, chromium.requests):
        list_.clear()
    yield chromium
    assert chromium.complaints == []


@pytest.fixture
def feed() -> PageFeed:
    return PageFeed(silent=frozenset({3}))


@pytest.fixture
def url(feed: PageFeed) -> Iterator[str]:
    with serve_page(feed) as address:
        yield address


def show(browser: Browser, url: str, view: str) -> None:
    """Open a view of the page afresh, and wait for its data."""
    browser.visit("about:blank")
    browser.visit(f"{url}/{view}")
    browser.wait_for(f"!{MAIN}.includes('Loading') && {SCOPE}.includes('vm')", f"data of {view}")


def click_button(browser: Browser, words: str) -> None:
    """Click the first button with these words."""
    found = (
        f"[...document.querySelectorAll('button')].find((each) => each.textContent === {json.dumps(words)})"
    )
    browser.wait_for(f"Boolean({found} && !{found}.disabled)", words)
    browser.run(f"{found}.click()")


def made_captures(*ids: str) -> list[dict[str, Any]]:
    """Return captures that have ended, as the daemon lists them: the last of these ids is the newest."""
    ended = {"run": HOSTILE_RUN, "state": "complete", "ranks": []}
    return [{"capture_id": each, **ended, "requested_at": 1.0 + at} for at, each in enumerate(ids)][::-1]


def test_run_view_new_steps_appear_by_themselves(browser: Browser, url: str) -> None:
    show(browser, url, "#/run/demo")
    first = browser.wait_for(NEWEST_STEP, "a step")
    browser.wait_for(f"{NEWEST_STEP} > {first}", "a later step")
    assert all(each.startswith((url, "about:")) for each in browser.requests)


def test_run_view_verdict_and_missing_rank_are_named(browser: Browser, url: str) -> None:
    show(browser, url, "#/run/demo")
    browser.wait_for(f"{MAIN}.includes('rank 5 does 70 ms more work')", "the verdict")
    browser.wait_for(f"{SCOPE}.includes('7 of 8 ranks report; missing: 3')", "the coverage")
    row = "[...document.querySelectorAll('tr.missing')].map((each) => each.innerText)"
    browser.wait_for(f"{row}.length === 1", "the missing rank's row")
    assert "no data" in browser.run(f"{row}[0]")
    label = "document.querySelector('#stream canvas').getAttribute('aria-label')"
    browser.wait_for(f"{label}.includes('No data of ranks 3')", "the missing rank in words")


def test_charts_are_a_table_too(browser: Browser, url: str) -> None:
    show(browser, url, "#/run/demo")
    browser.wait_for(NEWEST_STEP, "steps")
    browser.run("document.querySelector('main > div > details > summary').click()")
    table = "document.querySelector('main > div > details table')?.innerText"
    text = browser.wait_for(table, "the table")
    assert "wait for others" in text
    assert len(text.splitlines()) > 50


def test_overview_link_leads_to_the_run_and_back(browser: Browser, url: str) -> None:
    show(browser, url, "#/")
    browser.wait_for("document.querySelector('.card.run a')", "a run")
    browser.click(".card.run a")
    browser.wait_for("location.hash === '#/run/demo' && document.querySelector('h1').textContent === 'demo'")
    browser.run("history.back()")
    browser.wait_for("document.querySelector('h1').textContent === 'Runs'")
    assert browser.run("document.title") == "Runs · torchperfd"


def test_ranks_arrow_keys_move_and_enter_opens(browser: Browser, url: str) -> None:
    show(browser, url, "#/run/demo")
    browser.wait_for("document.querySelectorAll('.rank-labels a').length === 8", "labels of ranks")
    browser.run("document.querySelector('.rank-labels a').focus()")
    browser.press("ArrowDown")
    browser.press("ArrowDown")
    assert browser.run("document.activeElement.getAttribute('aria-label')") == "rank 2"
    assert browser.run("document.querySelectorAll('.rank-labels a[tabindex=\"0\"]').length") == 1
    browser.press("Enter")
    browser.wait_for("document.querySelector('h1').textContent === 'Rank 2'")


def test_run_name_with_markup_stays_text(browser: Browser) -> None:
    with serve_page(PageFeed(run=HOSTILE_RUN)) as url:
        show(browser, url, "#/")
        browser.wait_for("document.querySelector('.card.run a')", "a run")
        browser.run("document.querySelector('.card.run a').click()")
        browser.wait_for(f"document.querySelector('h1').textContent === {json.dumps(HOSTILE_RUN)}")
        browser.wait_for(f"{MAIN}.includes('Goodput')")
        assert browser.run("document.querySelectorAll('img').length") == 0
        assert browser.run("document.title") == f"{HOSTILE_RUN} · torchperfd"


def test_capture_without_token_asks_and_takes_one(browser: Browser, url: str) -> None:
    show(browser, url, "#/run/demo")
    click_button(browser, "Capture 5 steps")
    browser.wait_for("document.querySelector('dialog[open]')", "the question for the token")
    assert "torchperfd open" in browser.run("document.querySelector('dialog').innerText")
    browser.run("document.getElementById('token-field').value = 'wrong-token'")
    click_button(browser, "Use the token")
    browser.wait_for(f"{OUTCOME}.includes('refused the token')", "the refusal")
    assert browser.run("sessionStorage.length") == 0
    click_button(browser, "Capture 5 steps")
    browser.wait_for("document.querySelector('dialog[open]')", "the question for the token")
    browser.run(f"document.getElementById('token-field').value = {json.dumps(TOKEN)}")
    click_button(browser, "Use the token")
    browser.wait_for(f"{OUTCOME}.includes('Capture of 5 steps started')", "the capture")


def test_notice_goes_with_its_view_and_ends_with_its_capture(browser: Browser, url: str) -> None:
    show(browser, url, "#/run/demo")
    outcome = "document.querySelector('.outcome')"

    def run(program: str) -> str:
        actions = "const a = await import('/assets/actions.js');"
        browser.run(f"(async () => {{ {actions} {program} }})()")
        return str(browser.run(f"{outcome}.innerText"))

    begin = "a.showOutcome('good', 'Capture of 5 steps started'); a.outcomeBox().dataset.capture = 'one';"
    assert "started" in run(f"{begin} a.captureChanged({{ capture_id: 'one', state: 'armed' }});")
    assert "started" in run("a.captureChanged({ capture_id: 'two', state: 'complete' });")
    assert "Capture complete: open one" in run("a.captureChanged({ capture_id: 'one', state: 'complete' });")
    assert browser.run(f"{outcome}.querySelector('a').hash") == "#/capture/one"
    browser.run("location.hash = '#/node'")
    browser.wait_for(f"{outcome}.innerText === ''", "no notice in another view")


def test_token_in_the_address_is_taken_out_and_used(browser: Browser, url: str, feed: PageFeed) -> None:
    browser.visit(f"{url}/#token={TOKEN}")
    browser.wait_for("document.querySelector('.card.run a')", "a run")
    assert browser.run("location.href") == f"{url}/#/"
    browser.click(".card.run a")
    click_button(browser, "Capture 5 steps")
    browser.wait_for("document.querySelector('.outcome a')", "the capture")
    browser.click(".outcome a")
    browser.wait_for(f"{MAIN}.includes('0 of 8 ended')", "its progress")
    for rank in feed.captures[0]["ranks"]:
        rank["state"] = "complete"
    feed.captures[0] |= {"state": "complete", "ended_at": feed.captures[0]["requested_at"] + 2}
    browser.wait_for(f"{MAIN}.includes('8 of 8 ended') && {MAIN}.includes('Open the report')", "its end")


def test_wrong_token_in_the_address_is_refused(browser: Browser, url: str) -> None:
    browser.visit(f"{url}/#token=wrong-token")
    browser.wait_for(f"{OUTCOME}.includes('refused the token')", "the refusal")
    browser.wait_for("document.querySelector('.card.run a')", "a run all the same")
    assert browser.run("sessionStorage.length") == 0
    assert browser.run("location.href") == f"{url}/#/"


def test_saved_page_opens_from_disk_without_requests(browser: Browser, url: str, tmp_path: Path) -> None:
    browser.save_downloads(tmp_path)
    show(browser, url, "#/run/demo")
    browser.wait_for(NEWEST_STEP, "steps")
    click_button(browser, "Save this page")
    saved = _wait_for_file(browser, tmp_path)
    with Browser() as offline:
        offline.look_like(1280)
        offline.open(saved)
        offline.wait_for(f"{MAIN}.includes('rank 5 does 70 ms more work')", "the verdict")
        assert offline.run(NEWEST_STEP) > 0
        assert "does not change any more" in offline.run(BANNER)
        assert "Saved" in offline.run(SCOPE)
        assert offline.run("[...document.querySelectorAll('main button')].length") == 0
        assert offline.run("document.querySelector('#stream canvas').width") > 0
        assert (offline.complaints, offline.requests) == ([], [saved.as_uri()])


def _wait_for_file(browser: Browser, folder: Path) -> Path:
    for _ in range(2000):
        if found := list(folder.glob("*.html")):
            return found[0]
        browser.drawn()
    pytest.fail("nothing was saved")


def test_daemon_restart_is_shown_and_survived(browser: Browser, feed: PageFeed) -> None:
    with serve_page(feed) as url:
        show(browser, url, "#/run/demo")
        browser.wait_for(NEWEST_STEP, "steps")
    browser.wait_for(f"{BANNER}.includes('does not answer')", "the banner")
    assert "rank 5" in browser.run(MAIN)
    with serve_page(feed, port=int(url.rsplit(":", 1)[1])):
        browser.wait_for(f"{BANNER} === ''", "the connection")
        first = browser.run(NEWEST_STEP)
        browser.wait_for(f"{NEWEST_STEP} > {first}", "a later step")


def test_page_kept_for_the_back_button_has_no_stream(browser: Browser, url: str, feed: PageFeed) -> None:
    """A browser has six connections to a server, and keeps pages that were left with those that they hold."""
    show(browser, url, "#/run/demo")
    first = browser.wait_for(NEWEST_STEP, "a step")
    eventually(lambda: feed.streams == 1, 30)
    browser.run("dispatchEvent(new PageTransitionEvent('pagehide', { persisted: true }))")
    eventually(lambda: feed.streams == 0, 30)
    browser.run("dispatchEvent(new PageTransitionEvent('pageshow', { persisted: true }))")
    browser.wait_for(f"{NEWEST_STEP} > {first}", "a later step")
    eventually(lambda: feed.streams == 1, 30)


def test_page_without_any_daemon_shows_the_banner_alone(browser: Browser, feed: PageFeed) -> None:
    with serve_page(feed) as url:
        show(browser, url, "#/run/demo")
    browser.wait_for(f"{BANNER}.includes('does not answer')", "the banner")
    for view in ("#/run/ended", "#/rank/ended/0", "#/capture/20261128-000000-abc"):
        browser.run(f"location.hash = {json.dumps(view)}")
        browser.wait_for(f"!{MAIN}.includes('rank 5') && !{MAIN}.includes('Loading')", f"no data of {view}")
        browser.wait_for(f"{BANNER}.includes('ends with its run')", "the banner")
        assert view != "#/run/ended" or browser.run(MAIN).strip() == "ended"


@pytest.mark.parametrize("view", ["#/run/demo", "#/rank/demo/5"])
def test_buttons_go_when_the_run_ends(browser: Browser, url: str, feed: PageFeed, view: str) -> None:
    show(browser, url, view)
    browser.wait_for(f"{BUTTONS} === 2 && {BANNER} === ''", "the buttons")
    feed.state = "finished"
    browser.wait_for(f"/^This run ended 20\\d\\d-/.test({BANNER})", "the end")
    browser.wait_for(f"{BUTTONS} === 0", "no button")
    assert "Ended" in browser.run(SCOPE)
    assert browser.texts("#banner .warn, #banner .bad, #scope .warn") == []
    feed.forgotten = True
    gone = f"!{MAIN}.includes('Samples')" if "rank" in view else f"{MAIN}.includes('350 ms')"
    browser.wait_for(gone, "the row that stays")
    assert browser.run("document.querySelector('#view canvas').checkVisibility()")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_run_of_yesterday_is_its_row_and_its_end(browser: Browser, scheme: str) -> None:
    browser.look_like(1280, 900, scheme)
    with serve_page(PageFeed(forgotten=True)) as url:
        for view, gone in (("#/run/demo", "steps"), ("#/rank/demo/5", "ranks")):
            browser.visit("about:blank")
            browser.visit(f"{url}/{view}")
            browser.wait_for(f"{MAIN}.includes('The daemon no longer has the {gone} of this run')", gone)
            browser.wait_for(f"/^This run ended 20\\d\\d-/.test({BANNER})", "the end")
            assert browser.run(BUTTONS) == 0
            assert browser.texts("#banner .warn, #banner .bad, main .bad, main .warn") == []
            assert serious_violations(browser) == []
        show(browser, url, "#/run/demo")
        assert "380 ms" in browser.run(MAIN)
        assert not browser.run("document.querySelector('#view canvas').checkVisibility()")


def test_run_view_names_its_window_and_the_ranks_memory(browser: Browser, url: str) -> None:
    show(browser, url, "#/run/demo")
    browser.wait_for(f"{MAIN}.includes('are of the last 10 s of each rank')", "the window")
    browser.wait_for(f"{MAIN}.includes('RSS peak')", "the memory of the ranks")
    browser.wait_for(f"{MAIN}.includes('7.00 GiB')", "its peak")
    course = 'document.querySelector(`[aria-label^="RSS of rank 0 over "]`)'
    browser.wait_for(f"{course}?.ariaLabel.endsWith('highest 5.00 GiB')", "its course")
    browser.wait_for(f"{MAIN}.includes('1.20 GiB')", "its growth per minute")


def test_run_view_has_percentiles_and_the_slowest_rank(browser: Browser, url: str, feed: PageFeed) -> None:
    show(browser, url, "#/run/demo")
    browser.wait_for("document.querySelectorAll('tr.slow td').length > 0", "the table of ranks")
    assert browser.texts(".tile")[1:3] == [
        "Step p50270 ms 324 ms on rank 5, the slowest",
        "Step p95297 ms 378 ms on rank 5, the slowest",
    ]
    assert browser.texts("tr.slow td")[2:4] == ["324 ms", "378 ms"]
    assert browser.texts("tr.missing td")[2:4] == ["\u2013", "\u2013"]
    show(browser, url, "#/rank/demo/5")
    browser.wait_for(f"{MAIN}.includes('378 ms')", "the rank's own")


def test_thousand_ranks_show_the_slow_one(browser: Browser) -> None:
    with serve_page(PageFeed(ranks=1000, seconds=60, slow=777)) as url:
        show(browser, url, "#/run/demo")
        browser.wait_for(f"{MAIN}.includes('64 of 1000 ranks')", "the choice of ranks")
        labels = "[...document.querySelectorAll('.rank-labels a')].map((each) => each.textContent)"
        browser.wait_for(f"{labels}.includes('777 ◀')", "the slow rank")
        assert browser.run(f"{labels}.length") == 64


def test_fleet_is_chosen_and_kept_in_links(browser: Browser) -> None:
    with serve_page(PageFeed(remote=8)) as url:
        show(browser, url, "#/")
        browser.wait_for(f"{SCOPE}.includes('not known here: 8\u201315')", "the ranks of the other node")
        browser.wait_for("document.querySelector('[data-key=\"All nodes\"]')", "the choice")
        browser.click("[data-key='All nodes']")
        browser.wait_for(f"{SCOPE}.includes('16 of 16 ranks report') && {SCOPE}.includes('all nodes')")
        browser.wait_for("document.querySelector('.card.run a')", "a run")
        browser.click(".card.run a")
        browser.wait_for(f"{SCOPE}.includes('16 of 16 ranks report')", "the fleet's ranks")
        assert browser.run("location.hash") == "#/run/demo?fleet=1"
        browser.wait_for("document.querySelectorAll('.rank-labels a').length === 8", "this node's steps")


def test_two_captures_are_compared_as_a_page(browser: Browser, feed: PageFeed, url: str) -> None:
    ids = ["named-by-hand", "20261128-230000-abcdef", "20261129-230000-abcdef"]
    feed.captures = made_captures(*ids)
    browser.visit(f"{url}/#token={TOKEN}")
    browser.wait_for("location.hash === '#/'", "the token to be taken")
    browser.run("location.hash = '#/captures'")
    for each in (ids[1], ids[0]):
        box = f"document.querySelector('[data-key=\"choice {each}\"]')"
        browser.wait_for(f"Boolean({box})", "the capture")
        assert browser.run("[...document.querySelectorAll('[data-key=compare]')].length") == 0
        browser.run(f"{box}.click()")
    # The older one is A, whichever was chosen first.
    browser.wait_for(f"{MAIN}.includes('torchperfd compare {ids[0]} {ids[1]}')", "the choice")
    click_button(browser, "Compare the two")
    link = browser.wait_for("document.getElementById('report-link')?.href", "the link")
    assert link == f"{url}/links/{ids[0]}/comparison/{ids[1]}"
    assert "The comparison is ready" in browser.run(OUTCOME)
    assert browser.run(f"document.querySelector('[data-key=\"choice {ids[2]}\"]').disabled")
    assert browser.run("document.querySelectorAll('main img').length") == 0


def test_chosen_captures_are_in_the_address(browser: Browser, feed: PageFeed, url: str) -> None:
    feed.captures = made_captures("one", "two", "three")
    chosen = "[...document.querySelectorAll('input:checked')].map((each) => each.dataset.key).join()"
    show(browser, url, "#/captures")
    for each, address in (("three", "?a=three"), ("one", "?a=one&b=three")):
        browser.run(f"document.querySelector('[data-key=\"choice {each}\"]').click()")
        browser.wait_for(f"location.hash === '#/captures{address}'", "the address")
    browser.wait_for(f"{MAIN}.includes('A: one, B: three')", "both")
    browser.run("history.back()")
    browser.wait_for(f"{chosen} === 'choice three'", "the first choice")
    show(browser, url, "#/captures?a=one&b=three")
    browser.wait_for(f"{MAIN}.includes('A: one, B: three')", "both again")
    assert browser.run(chosen) == "choice three,choice one"
    browser.run("document.querySelector('[data-key=one]').click()")
    browser.wait_for("location.hash === '#/capture/one'", "one of them")
    browser.run("history.back()")
    browser.wait_for(f"{MAIN}.includes('A: one, B: three')", "both again")
    # A link may have them in any order, and one that is too old for the list.
    feed.listed = 2
    show(browser, url, "#/captures?a=two&b=one")
    browser.wait_for(f"{MAIN}.includes('A: two, B: one')", "the captures of the link")
    browser.run("document.querySelector('[data-key=clear]').click()")
    browser.wait_for(f"location.hash === '#/captures' && {chosen} === ''", "no choice")


def test_wrong_captures_in_the_address_are_named(browser: Browser, feed: PageFeed, url: str) -> None:
    feed.captures = made_captures("one", "two")
    for wrong in ("nope", "<img src=x>", "..", "x" * 5000):
        show(browser, url, f"#/captures?a={quote(wrong)}&b=two")
        browser.wait_for(f"{MAIN}.includes({json.dumps('Cannot compare ' + wrong[:80])})", "what is wrong")
        assert "Chosen: two." in browser.run(MAIN)
        assert browser.run("document.querySelectorAll('main img, [data-key=compare]').length") == 0
    browser.run("document.querySelector('[data-key=\"choice one\"]').click()")
    browser.wait_for(f"{MAIN}.includes('A: one, B: two') && !{MAIN}.includes('Cannot')", "two that are there")
    for odd in ("?a=one&b=one", "?a=one&a=one&b=", "?b=one&c=two"):
        show(browser, url, f"#/captures{odd}")
        browser.wait_for(f"{MAIN}.includes('Chosen: one. Choose another one.')", "one of two")


def test_unknown_run_is_named_once_with_a_way_back(browser: Browser, url: str) -> None:
    browser.visit(f"{url}/#/run/nonexist")
    browser.wait_for(f"{MAIN}.includes('no run nonexist on this node')", "the problem")
    assert browser.run("document.getElementById('banner').innerText") == ""
    browser.click("#view p a")
    browser.wait_for("location.hash === '#/'", "the overview")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_views_are_accessible_and_fit_a_phone(browser: Browser, url: str, scheme: str) -> None:
    browser.look_like(380, 800, scheme)
    for view in VIEWS:
        show(browser, url, view)
        assert browser.run("document.documentElement.scrollWidth") <= 380, view
        assert browser.run(CHECKED) == [], view


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_views_break_no_serious_rule_of_axe(browser: Browser, url: str, feed: PageFeed, scheme: str) -> None:
    browser.look_like(1280, 900, scheme)
    rank = {"rank": 0, "state": "complete", "reason": "", "steps_made": 5}
    at = feed.began
    made = {"capture_id": "one", "run": "demo", "state": "complete", "ranks": [rank], "options": {"steps": 5}}
    feed.captures.append({**made, "requested_at": at, "ended_at": at + 2, "trigger": "command"})
    for view in VIEWS:
        show(browser, url, view)
        assert serious_violations(browser) == [], view
    browser.run("location.hash = '#/capture/one'")
    browser.wait_for(f"{MAIN}.includes('1 of 1 ended')", "the capture")
    assert serious_violations(browser) == []
    click_button(browser, "Enter token")
    browser.wait_for("document.querySelector('dialog[open]')", "the question for the token")
    assert serious_violations(browser) == []


def test_axe_finds_a_button_without_a_name(browser: Browser, url: str) -> None:
    show(browser, url, "#/")
    browser.run("document.querySelector('button').textContent = ''")
    assert [each.partition(":")[0] for each in serious_violations(browser)] == ["button-name"]


def test_skip_link_leads_to_the_content(browser: Browser, url: str) -> None:
    show(browser, url, "#/")
    browser.run("document.getElementById('skip').focus()")
    browser.press("Enter")
    assert browser.run("document.activeElement.id") == "view"
    assert browser.run("location.hash") == "#/"


def test_statistics_keep_outliers_and_gaps(browser: Browser, url: str) -> None:
    browser.visit(f"{url}/")
    module = "const s = await import('/assets/statistics.js');"

    def evaluate(expression: str) -> object:
        return browser.run(f"(async () => {{ {module} return JSON.stringify({expression}); }})()")

    assert evaluate("s.sampleLongest([1, 9, 1, 1, 1, 2], 3)") == '{"chosen":[1,2,5],"every":2}'
    assert evaluate("s.sampleLongest([1, 2], 3)") == '{"chosen":[0,1],"every":1}'
    # The rule of the daemon's percentiles.
    assert evaluate("s.percentile([8, 1, 4, 2], 0.5)") == "3"
    assert evaluate("s.percentile([...Array(21).keys()], 0.95)") == "19"
    columns = (
        "[{at: [10, 12], seconds: [1, 3], phases: {data: [1, 3]}}, {at: [10], seconds: [2], phases: {}}]"
    )
    across = f"s.acrossRanks({columns}, 10, 12)"
    assert evaluate(f"{across}.p95") == "[2,null,3]"
    assert evaluate(f"[...{across}.phases.get('data')]") == "[0.5,null,3]"
    assert evaluate("[...s.medians([[1, NaN], [3, NaN]], 2)]") == "[2,null]"
    ranks = "Array.from({length: 500}, (_, rank) => ({rank, ownSeconds: rank === 77 ? 9 : 1 + rank / 1e4}))"
    chosen = f"s.chooseRanks({ranks}, 20, [300]).shown.map((each) => each.rank)"
    assert evaluate(f"{chosen}.length === 20 && {chosen}.includes(77) && {chosen}.includes(300)") == "true"


def test_history_keeps_steps_across_a_gap(browser: Browser, url: str) -> None:
    browser.visit(f"{url}/")
    program = """
    (async () => {
      const { RunHistory } = await import('/assets/run_history.js');
      const steps = (first, count) => ({ first_step: first, end_unix_seconds: Array(count).fill(first),
        step_seconds: Array(count).fill(0.1), phase_seconds: { data: Array(count).fill(0.05) } });
      const history = new RunHistory({ ranks: [{ rank: 0, steps: steps(0, 200) }] });
      const kept = () => {
        const { first_step, step_seconds, phase_seconds } = history.ranks.get(0).steps;
        const missing = step_seconds.filter((each) => each === null).length;
        return [first_step, step_seconds.length, phase_seconds.data.length, missing];
      };
      const add = (first, count) => {
        history.addSteps({ ranks: [{ rank: 0, ...steps(first, count) }] });
        return kept();
      };
      const before = [add(195, 10), add(210, 10), add(260, 10), history.beginOf(207)];
      return JSON.stringify([...before, add(900, 5), add(0, 3)]);
    })()
    """
    assert json.loads(browser.run(program)) == [
        [0, 205, 205, 0],
        [0, 220, 220, 5],
        [14, 256, 256, 45],
        None,
        [900, 5, 5, 0],
        [0, 3, 3, 0],
    ]
