"""The screen of ``top`` on a terminal, by textual: keys, the mouse, resizing, and redrawing what has changed.

It is imported while the daemon answers, and by no other command.
"""

import asyncio
import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, ClassVar, Final

from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.drivers.linux_driver import LinuxDriver
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from torchperfd_cli.commands._top_actions import TopActions
from torchperfd_cli.commands._top_feed import Feed
from torchperfd_cli.commands._top_lines import Canvas, Line, target_of
from torchperfd_cli.commands._top_screen import Drawing
from torchperfd_cli.commands._top_state import WHEEL_DOWN, WHEEL_UP, Action, TopState

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_MOUSE_ON: Final = "\x1b[?1000h\x1b[?1006h"
_MOUSE_OFF: Final = "\x1b[?1006l\x1b[?1003l\x1b[?1000l"
_LOOK_EVERY_S: Final = 1.0


class Lines(Widget):
    """The lines of the screen; those that are the same as before are not drawn again.

    Args:
        drawn: Returns them for a size.
    """

    def __init__(self, drawn: Callable[[Size], list[Line]]) -> None:
        super().__init__()
        self._drawn_lines, self._drawn_size = drawn, Size(0, 0)
        self._shown_lines: list[Line] = []

    def update(self) -> None:
        """Draw what has changed."""
        before = self._shown_lines
        is_resized = self._is_resized()
        self._shown_lines = self._drawn_lines(self.size)
        if is_resized:
            self.refresh()
            return
        width = self.size.width
        changed = [
            Region(0, number, width, 1)
            for number, (old, new) in enumerate(zip(before, self._shown_lines, strict=True))
            if old != new
        ]
        if changed:
            self.refresh(*changed)

    def render_line(self, y: int) -> Strip:
        """Return a line of the screen."""
        if self._is_resized():
            self._shown_lines = self._drawn_lines(self.size)
        return Strip(self._shown_lines[y]).adjust_cell_length(self.size.width)

    def _is_resized(self) -> bool:
        before, self._drawn_size = self._drawn_size, self.size
        return before != self.size


class _Driver(LinuxDriver):
    """Draws on stdout, so that stderr can be sent elsewhere, and not on a terminal that has gone."""

    def __init__(self, app: App[Any], **options: Any) -> None:
        super().__init__(app, **options)
        self._file = sys.__stdout__ or self._file
        self._is_suspended = False

    def suspend_application_mode(self) -> None:
        """Leave the terminal to the shell."""
        self._is_suspended = True
        super().suspend_application_mode()

    def resume_application_mode(self) -> None:
        """Take the terminal again, once: a process that was stopped without Ctrl-Z has kept it."""
        if self._is_suspended:
            self._is_suspended = False
            super().resume_application_mode()

    def write(self, data: str) -> None:
        """Write while there is a terminal; without one, nothing empties the queue, and a full one blocks."""
        if os.isatty(self.fileno):
            super().write(data)


class TopApp(App[None]):
    """The terminal while ``top`` has it.

    Args:
        feed: Where frames come from; it has one.
        actions: What keys ask of the daemon.
        plain: Whether the terminal has no colours.
    """

    CSS = """
    Screen { overflow: hidden; }
    Lines { width: 100%; height: 100%; }
    """
    ENABLE_COMMAND_PALETTE = False
    ALLOW_SELECT = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
    ]

    def __init__(self, feed: Feed, actions: TopActions, *, plain: bool) -> None:
        # The terminal's own colours, also its background.
        super().__init__(driver_class=_Driver, ansi_color=True)
        self._feed, self._top_actions, self._is_plain = feed, actions, plain
        self._frame = feed.frame()
        self._state = TopState()
        self._screen_lines = Lines(self._draw)

    def compose(self) -> ComposeResult:
        yield self._screen_lines

    def on_mount(self) -> None:
        """Read further frames once the first one is drawn."""
        self.app_resume_signal.subscribe(self, self._resume)
        self.call_after_refresh(self._feed.go_on, self._notify)
        if not self.is_headless:
            self.set_interval(_LOOK_EVERY_S, self._end_with_terminal)

    def on_key(self, event: events.Key) -> None:
        self._press(event.character if event.is_printable and event.character else event.key)

    def on_paste(self, event: events.Paste) -> None:
        """Take a text for the filter; as keys it would be commands."""
        for character in event.text if self._state.is_typing else "":
            self._press(character)

    def on_click(self, event: events.Click) -> None:
        if event.button == 1:
            self._state.click(target_of(event.style))
            self._screen_lines.update()

    def on_mouse_scroll_up(self, _: events.MouseScrollUp) -> None:
        self._press(WHEEL_UP)

    def on_mouse_scroll_down(self, _: events.MouseScrollDown) -> None:
        self._press(WHEEL_DOWN)

    def take(self) -> None:
        """Show what the daemon has answered."""
        if self._feed.has_failed:
            self.exit()
            return
        self._frame = self._feed.frame()
        while not self._top_actions.messages.empty():
            self._state.message = self._top_actions.messages.get()
        while not self._top_actions.texts.empty():
            self._state.show_text(self._top_actions.texts.get())
        self._screen_lines.update()

    def end(self, number: signal.Signals) -> None:
        """Leave the terminal as it was; a signal other than Ctrl-C has an exit code of its own."""
        self.exit(return_code=0 if number is signal.SIGINT else 128 + number)

    def _end_with_terminal(self) -> None:
        """Exit once the terminal has gone: under nohup no signal comes, and textual would read on."""
        if not sys.stdin.isatty():
            self.exit()

    def _draw(self, size: Size) -> list[Line]:
        return Drawing(self._frame, size.height, self._state).lines(Canvas(size.width, self._is_plain))

    def _notify(self) -> None:
        self.call_later(self.take)

    def _press(self, key: str) -> None:
        state = self._state
        shown = state.arrange(self._frame)
        action = state.press(key, shown)
        self._feed.is_paused = state.is_paused
        if action is Action.QUIT:
            self.exit()
        elif action is Action.CAPTURE:
            self._top_actions.capture(state.run(shown), self._notify)
        elif action is Action.STACKS:
            self._top_actions.stacks(state.run(shown), self._notify)
        elif action is Action.MOUSE:
            self._report_mouse()
        self._screen_lines.update()

    def _report_mouse(self) -> None:
        """Have clicks reported, or leave the mouse to the terminal, which selects text with it."""
        if self._driver is not None:
            self._driver.write(_MOUSE_ON if self._state.has_mouse else _MOUSE_OFF)

    def _resume(self, _: object) -> None:
        """Draw again after a suspension; the shell has written over the screen."""
        self._report_mouse()
        self.refresh(layout=True)


def run_app(app: TopApp) -> int:
    """Run until its end; return the exit code."""

    async def run() -> int:
        loop = asyncio.get_running_loop()
        for number in _ENDING:
            # One that is ignored, as by nohup, stays so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, functools.partial(app.end, number))
        await app.run_async()
        return app.return_code or 0

    return asyncio.run(run())
