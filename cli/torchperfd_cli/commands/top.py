"""``torchperfd top``, and what its keys ask of the daemon: a capture, and stacks."""

import json
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Final

import click
from rich.console import Console, RenderableType
from rich.live import Live

from torchperfd.document.terminal import render
from torchperfd.model.verdict_document import verdict_to_document
from torchperfd.v1 import control_pb2, session_pb2
from torchperfd.v1.contract import AUTOMATIC_CAPTURE_S
from torchperfd_cli.commands import _top_state
from torchperfd_cli.commands._capture_progress import state_of
from torchperfd_cli.commands._daemon import connect
from torchperfd_cli.commands._options import json_option, socket_option
from torchperfd_cli.commands._scope import Scope, missing, scope_options
from torchperfd_cli.commands._top_charts import Throughput, ages, step_seconds
from torchperfd_cli.commands._top_input import Click, Event, Events, Terminal, target_at
from torchperfd_cli.commands._top_screen import draw
from torchperfd_cli.commands._top_state import Action, Frame, TopState
from torchperfd_daemon.errors import PartialResultError, TorchperfdError
from torchperfd_daemon.service import translate_diagnosis
from torchperfd_daemon.stacks.merge import merge
from torchperfd_daemon.stacks.report import stacks_document
from torchperfd_daemon.views import live as _view
from torchperfd_daemon.views.documents import each_once

_CAPTURE_STEPS: Final = 5
_CAPTURE_TIMEOUT_S: Final = 60.0
_STACKS_TIMEOUT_S: Final = 5.0


class TopActions:
    """Runs one action at a time.

    Args:
        socket: The socket of the daemon; None for the usual places.
        fleet: Whether ranks of all nodes are meant.
    """

    def __init__(self, socket: str | None, *, fleet: bool) -> None:
        self._socket, self._fleet = socket, fleet
        self._thread: threading.Thread | None = None
        self.messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        """What to say, the newest last."""
        self.texts: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Texts to show on a page of their own."""

    def capture(self, run: str) -> None:
        """Capture the next steps of a run."""
        self._begin(lambda: self._capture(run))

    def stacks(self, run: str) -> None:
        """Fetch the stacks of a run's ranks."""
        self._begin(lambda: self._stacks(run))

    def _begin(self, action: Callable[[], None]) -> None:
        if self._thread is not None and self._thread.is_alive():
            self.messages.put("the last action is still in progress")
            return
        self._thread = threading.Thread(target=self._run, args=(action,), name="top-action", daemon=True)
        self._thread.start()

    def _run(self, action: Callable[[], None]) -> None:
        try:
            action()
        except TorchperfdError as error:
            self.messages.put(f"! {error}")

    def _capture(self, run: str) -> None:
        self.messages.put(f"capturing {_CAPTURE_STEPS} steps of {run} …")
        options = session_pb2.CaptureOptions(steps=_CAPTURE_STEPS)
        request = control_pb2.CaptureRequest(
            run=run, options=options, timeout_seconds=_CAPTURE_TIMEOUT_S, fleet=self._fleet
        )
        with connect(self._socket) as daemon:
            for progress in daemon.Capture(request, timeout=_CAPTURE_TIMEOUT_S + AUTOMATIC_CAPTURE_S + 60):
                words = f"capture {progress.capture_id}: {state_of(progress)}"
                if progress.state == control_pb2.CAPTURE_STATE_COMPLETE:
                    words += f"; torchperfd analyze {progress.capture_id}"
                elif progress.reason:
                    words += f", {progress.reason}"
                self.messages.put(words)

    def _stacks(self, run: str) -> None:
        self.messages.put(f"fetching the stacks of {run} …")
        request = control_pb2.StacksRequest(run=run, timeout_seconds=_STACKS_TIMEOUT_S, fleet=self._fleet)
        with connect(self._socket) as daemon:
            messages = daemon.Stacks(request, timeout=_STACKS_TIMEOUT_S + 10)
            answers = [
                translate_diagnosis.rank_stacks_from_message(each)
                for each in messages
                if not each.HasField("unreachable")
            ]
        answers = each_once(answers)
        self.texts.put(render(stacks_document(run, answers, merge(answers))))
        self.messages.put("")


_TIMEOUT_S: Final = 5.0
_EVERY_S: Final = 0.5
_NEWEST_STEPS: Final = 64
"""Few enough to show changes quickly, enough to distinguish a slow rank from noise."""


@click.command("top")
@scope_options
@socket_option
@json_option
def top_command(run: str, job: str, fleet: bool, socket: str | None, as_json: bool) -> None:
    """Show runs, ranks, the node's GPUs and the verdict, twice a second, until q or Ctrl-C; ? shows all keys.

    Off a terminal, on one without control sequences (TERM=dumb) and with --json, one frame is printed.
    With --fleet or --job, the ranks of all nodes; daemons that do not answer are named (exit code 5).
    """
    console = Console()
    scope = Scope(run, job, fleet)
    with connect(socket) as daemon:
        scope = scope.whole(daemon)
        frame = _ask(daemon, scope)
    if as_json or not console.is_terminal or console.is_dumb_terminal:
        if as_json:
            click.echo(json.dumps(_document(frame)))
        else:
            console.print(draw(replace(frame, problem="")))
        if frame.problem:
            raise PartialResultError(frame.problem)
        return
    try:
        with (
            Terminal() as terminal,
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            Top(scope, socket, terminal, live).follow(frame)
    except KeyboardInterrupt:
        return


class Top:
    """The screen while it is on: refreshes twice a second, and acts on keys.

    Args:
        scope: The runs.
        socket: The socket of the daemon; None for the usual places.
    """

    def __init__(self, scope: Scope, socket: str | None, terminal: Terminal, live: Live) -> None:
        self._scope, self._socket, self._terminal, self._live = scope, socket, terminal, live
        self._events = Events(is_on=terminal.is_on)
        self._state = TopState()
        self._actions = TopActions(socket, fleet=scope.fleet)
        self._throughput = Throughput()

    def follow(self, frame: Frame) -> None:
        """Refresh until q is pressed; wait for a daemon that has ended to restart."""
        while True:
            try:
                with connect(self._socket) as daemon:
                    while True:
                        if not self._state.is_paused:
                            frame = self._ask(daemon)
                        if not self._show(frame):
                            return
            except TorchperfdError as error:
                if not self._show(replace(frame, problem=str(error), clock=_clock())):
                    return

    def _ask(self, daemon: Any) -> Frame:
        frame = _ask(daemon, self._scope)
        if not frame.nodes:
            self._throughput.update(daemon, frame.runs, time.monotonic())
            frame = replace(frame, samples_per_second=self._throughput.rates())
        return frame

    def _show(self, frame: Frame) -> bool:
        """Show a frame until the next one is due; return False once q is pressed."""
        deadline = time.monotonic() + _EVERY_S
        while True:
            self._take_results()
            self._live.update(self._drawn(frame), refresh=True)
            left = deadline - time.monotonic()
            if left <= 0:
                return True
            for event in self._events.within(left):
                if not self._take(event, frame):
                    return False

    def _take(self, event: Event, frame: Frame) -> bool:
        """Act on a key or a click; return False once q is pressed."""
        if isinstance(event, Click):
            console = self._live.console
            self._state.click(target_at(self._drawn(frame), event.column, event.line, console))
            return True
        return self._act(self._state.press(event, self._state.arrange(frame)), frame)

    def _drawn(self, frame: Frame) -> RenderableType:
        return draw(frame, self._live.console.height, self._state)

    def _act(self, action: Action, frame: Frame) -> bool:
        run = self._state.run(self._state.arrange(frame))
        if action is Action.CAPTURE:
            self._actions.capture(run)
        elif action is Action.STACKS:
            self._actions.stacks(run)
        elif action is Action.MOUSE:
            self._terminal.report_mouse(wanted=self._state.has_mouse)
        return action is not Action.QUIT

    def _take_results(self) -> None:
        while not self._actions.messages.empty():
            self._state.message = self._actions.messages.get()
        while not self._actions.texts.empty():
            self._state.show_text(self._actions.texts.get())


def _ask(daemon: Any, scope: Scope) -> Frame:
    node = daemon.GetInfo(control_pb2.GetInfoRequest(), timeout=_TIMEOUT_S).node
    steps = scope.steps(daemon, _NEWEST_STEPS)
    judged = scope.verdicts(daemon)
    wanted = control_pb2.GetReadingsRequest(names=_top_state.READINGS)
    readings = daemon.GetReadings(wanted, timeout=_TIMEOUT_S).readings
    return Frame(
        node=node,
        clock=_clock(),
        view=_top_state.node(readings),
        runs=_view.runs(steps.ranks),
        verdicts={each.run: each for each in judged.verdicts},
        nodes=len(steps.nodes),
        problem=missing(steps) or missing(judged),
        step_seconds=step_seconds(steps.ranks),
        ages=ages(steps.ranks, time.time()),
        steps=steps.ranks,
    )


def _document(frame: Frame) -> dict[str, Any]:
    return {
        "schema": "torchperfd.top/1",
        "node": {"name": frame.node, **asdict(frame.view)},
        "runs": [
            {
                **_view.run_dict(run),
                "verdict": verdict_to_document(frame.verdicts[run.run])
                if run.run in frame.verdicts
                else None,
            }
            for run in frame.runs
        ],
    }


def _clock() -> str:
    return time.strftime("%H:%M:%S")
