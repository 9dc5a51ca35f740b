"""The screen of ``top`` with textual, but no terminal: keys, clicks, the wheel, resizing, and redrawing."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.support.golden import check_golden
from tests.unit.daemon.top_frames import frame
from textual import events
from textual.pilot import Pilot

from torchperfd_cli.commands._scope import Scope
from torchperfd_cli.commands._top_actions import TopActions
from torchperfd_cli.commands._top_app import Lines, TopApp
from torchperfd_cli.commands._top_feed import Feed
from torchperfd_cli.commands._top_state import Frame

SIZES = [(80, 24), (200, 50)]


class FakeFeed(Feed):
    """A feed with the frames of a test."""

    def __init__(self, shown: Frame) -> None:
        super().__init__(Scope(), None)
        self.shown = shown
        self.changed: Callable[[], None] = lambda: None

    def frame(self) -> Frame:
        return self.shown

    def go_on(self, changed: Callable[[], None]) -> None:
        self.changed = changed


class FakeActions(TopActions):
    """Writes down what is asked for, and answers at once."""

    def __init__(self) -> None:
        super().__init__(None, fleet=False)
        self.asked: list[tuple[str, str]] = []

    def capture(self, run: str, changed: Callable[[], None]) -> None:
        self.asked.append(("capture", run))
        self.messages.put(f"capturing 5 steps of {run} …")
        changed()

    def stacks(self, run: str, changed: Callable[[], None]) -> None:
        self.asked.append(("stacks", run))
        self.texts.put("\n".join(f"line {number}" for number in range(60)))
        changed()


class Screen:
    """A running `top`."""

    def __init__(self, app: TopApp, pilot: Pilot[Any], feed: FakeFeed, actions: FakeActions) -> None:
        self.app, self.pilot, self.feed, self.actions = app, pilot, feed, actions

    def lines(self) -> list[str]:
        """Return the screen as text."""
        shown = self.app.query_one(Lines)
        return [shown.render_line(line).text.rstrip() for line in range(shown.size.height)]

    def text(self) -> str:
        return "\n".join(self.lines())

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def click(self, text: str, button: int = 1) -> None:
        """Click on the only place with a text."""
        [(line, each)] = [(line, each) for line, each in enumerate(self.lines()) if text in each]
        await self.pilot.click(offset=(each.index(text), line), button=button)
        await self.pilot.pause()

    async def turn_wheel(self, event: type[events.MouseScrollUp | events.MouseScrollDown]) -> None:
        self.app.post_message(event(None, 5, 5, 0, 0, 0, False, False, False, 5, 5))
        await self.pilot.pause()

    async def show(self, shown: Frame) -> None:
        """Have a new frame."""
        self.feed.shown = shown
        self.feed.changed()
        await self.pilot.pause()


@contextlib.asynccontextmanager
async def opened(size: tuple[int, int] = (80, 24)) -> AsyncIterator[Screen]:
    """Run `top` on a screen of a size."""
    feed, actions = FakeFeed(frame()), FakeActions()
    app = TopApp(feed, actions, plain=True)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        yield Screen(app, pilot, feed, actions)


CASES: dict[str, list[str]] = {
    "at first": [],
    "a rank selected": ["down", "down"],
    "details of the rank that the verdict names": ["enter"],
    "sorted, filtered and paused": ["s", "slash", *"node", "minus", "1", "enter", "p"],
    "typing a filter": ["slash", "x"],
    "help": ["question_mark"],
}


@pytest.mark.parametrize(("width", "height"), SIZES)
async def test_top_screens_are_the_golden_file(width: int, height: int) -> None:
    parts = []
    for name, keys in CASES.items():
        async with opened((width, height)) as screen:
            await screen.press(*keys)
            lines = screen.lines()
            assert len(lines) == height, name
            assert max(map(len, lines)) <= width, name
            parts.append(f"# {name}\n" + "\n".join(lines))
    check_golden(f"top_{width}x{height}.txt", "\n\n".join(parts) + "\n")


@pytest.mark.parametrize("size", SIZES)
async def test_click_on_a_rank_opens_it_and_another_goes_back(size: tuple[int, int]) -> None:
    async with opened(size) as screen:
        await screen.click("▶ 5")
        assert "5 of 8 in bert-17" in screen.text()
        await screen.click("SHARE OF THE STEP")
        assert "»▶ 5" in screen.text()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("head", "order"), [("VS PEERS", "own work"), ("WAIT", "wait"), ("STEP ", "step")])
async def test_click_on_the_head_of_a_column_sorts(head: str, order: str, size: tuple[int, int]) -> None:
    async with opened(size) as screen:
        await screen.click(head)
        assert f"by {order}" in screen.lines()[0]
        await screen.click("STEPS")
        assert f"by {order}" in screen.lines()[0], "nothing sorts by the number of steps"
        await screen.click("RANK")
        assert " by " not in screen.lines()[0]


async def test_click_between_rows_or_of_another_button_is_nothing() -> None:
    async with opened() as screen:
        before = screen.text()
        await screen.click("fix: give")
        await screen.click("help q quit")
        await screen.click("▶ 5", button=3)
        assert screen.text() == before


async def test_wheel_selects_ranks() -> None:
    async with opened() as screen:
        for event in (events.MouseScrollDown, events.MouseScrollDown, events.MouseScrollUp):
            await screen.turn_wheel(event)
        assert "»0" in screen.text()


async def test_resized_screen_is_laid_out_anew() -> None:
    async with opened() as screen:
        for width, height in ((120, 40), (60, 12), (20, 4), (3, 1), (80, 24)):
            await screen.pilot.resize_terminal(width, height)
            await screen.pilot.pause()
            lines = screen.lines()
            assert len(lines) == height
            assert max(map(len, lines)) <= width
        assert "✗ slow rank" in screen.text()


async def test_new_frame_redraws_only_the_lines_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    render_line = Lines.render_line

    def watched(self: Lines, y: int) -> Any:
        drawn.append(y)
        return render_line(self, y)

    async with opened() as screen:
        monkeypatch.setattr(Lines, "render_line", watched)
        await screen.show(replace(frame(), clock="12:00:01"))
        await screen.show(replace(frame(), clock="12:00:01"))
        assert drawn == [0]


async def test_paused_top_reads_nothing_and_goes_on() -> None:
    async with opened() as screen:
        await screen.press("p")
        assert screen.feed.is_paused
        assert "paused" in screen.lines()[0]
        await screen.press("p")
        assert not screen.feed.is_paused


async def test_problem_is_shown_above_the_last_frame() -> None:
    async with opened() as screen:
        await screen.show(replace(frame(), problem="the daemon has ended"))
        assert screen.lines()[1] == "! the daemon has ended"
        assert "✗ slow rank" in screen.text()


async def test_keys_ask_for_captures_and_stacks() -> None:
    async with opened() as screen:
        await screen.press("c")
        assert screen.lines()[-1] == " capturing 5 steps of bert-17 …"
        await screen.press("k")
        assert screen.lines()[1] == "line 0"
        await screen.turn_wheel(events.MouseScrollDown)
        assert screen.lines()[1] == "line 3"
        assert screen.actions.asked == [("capture", "bert-17"), ("stacks", "bert-17")]


async def test_pasted_text_is_a_filter_and_no_keys() -> None:
    async with opened() as screen:
        screen.app.post_message(events.Paste("q"))
        await screen.press("slash")
        screen.app.post_message(events.Paste("node-1"))
        await screen.press("enter")
        assert "filter node-1" in screen.lines()[0]


async def test_mouse_key_says_what_it_did() -> None:
    async with opened() as screen:
        await screen.press("m")
        assert screen.lines()[-1] == " mouse off, so that it selects text; m switches it on"
        await screen.press("m")
        assert "m mouse" in screen.lines()[-1]


@pytest.mark.parametrize("key", ["q", "Q", "ctrl+c", "ctrl+q"])
async def test_key_ends_top(key: str) -> None:
    async with opened() as screen:
        await screen.press(key)
        assert not screen.app.is_running
        assert not screen.app.return_code
