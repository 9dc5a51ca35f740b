"""The data of ``top``: read of the daemon twice a second, by a thread of its own.

The first frame has what the daemon has computed itself. Comparing ranks needs numpy, whose import would take
a fifth of the time in which `top` opens.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from torchperfd.v1 import control_pb2
from torchperfd_cli.commands import _top_state
from torchperfd_cli.commands._scope import Scope, missing
from torchperfd_cli.commands._top_charts import Throughput, ages, step_seconds
from torchperfd_cli.commands._top_state import Frame
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.views.model import RunView, first_runs, of_the_present

_TIMEOUT_S: Final = 5.0
_EVERY_S: Final = 0.5
_NEWEST_STEPS: Final = 64
"""Few enough to show changes quickly, enough to distinguish a slow rank from noise."""
_SLOW_READS: Final = 2
"""Verdicts and metrics are new once a second, so they are read every second time."""


class Reader:
    """Reads frames of one daemon; what its steps amount to is computed again only once they have changed."""

    def __init__(self, daemon: Any, scope: Scope, throughput: Throughput | None = None) -> None:
        self._daemon, self._scope, self._throughput = daemon, scope, throughput
        self._node: str = daemon.GetInfo(control_pb2.GetInfoRequest(), timeout=_TIMEOUT_S).node
        self._reads = 0
        self._steps: control_pb2.GetStepsResponse | None = None
        self._runs: Sequence[RunView] = ()
        self._judged = control_pb2.DiagnoseResponse()
        self._view = _top_state.node(())
        self._step_seconds: dict[str, tuple[float, ...]] = {}

    def first(self) -> Frame:
        """Return a frame in which ranks are not compared."""
        steps = self._scope.steps(self._daemon, _NEWEST_STEPS)
        self._read_slowly()
        self._step_seconds = step_seconds(steps.ranks)
        return self._frame(steps, first_runs(steps.ranks))

    def read(self) -> Frame:
        # Imports numpy.
        from torchperfd_daemon.views import live

        steps = self._scope.steps(self._daemon, _NEWEST_STEPS)
        if self._reads % _SLOW_READS == 0:
            self._read_slowly()
        self._reads += 1
        if steps != self._steps:
            self._steps, self._runs = steps, live.runs(map(of_the_present, steps.ranks))
            self._step_seconds = step_seconds(steps.ranks)
        if self._throughput is not None and not steps.nodes:
            self._throughput.update(self._daemon, self._runs, time.monotonic())
        return self._frame(steps, self._runs)

    def _read_slowly(self) -> None:
        self._judged = self._scope.verdicts(self._daemon)
        wanted = control_pb2.GetReadingsRequest(names=_top_state.READINGS)
        self._view = _top_state.node(self._daemon.GetReadings(wanted, timeout=_TIMEOUT_S).readings)

    def _frame(self, steps: control_pb2.GetStepsResponse, runs: Sequence[RunView]) -> Frame:
        return Frame(
            node=self._node,
            clock=_clock(),
            view=self._view,
            runs=runs,
            verdicts={each.run: each for each in self._judged.verdicts},
            nodes=len(steps.nodes),
            problem=missing(steps) or missing(self._judged),
            step_seconds=self._step_seconds,
            samples_per_second=self._throughput.rates() if self._throughput is not None else {},
            ages=ages(steps.ranks, time.time()),
            steps=steps.ranks,
        )


class Feed:
    """Reads frames until it is stopped; waits for a daemon that has ended to restart.

    Args:
        scope: The runs.
        socket: The socket of the daemon; None for the usual places.
    """

    def __init__(self, scope: Scope, socket: str | None) -> None:
        self._scope, self._socket = scope, socket
        self.is_paused = False
        """Whether nothing is read."""
        self._frame: Frame | None = None
        self._error: BaseException | None = None
        self._changed: Callable[[], None] = _nothing
        self._throughput = Throughput()
        self._has_answer, self._is_open, self._stopped = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._run, name="top-feed", daemon=True)

    def start(self) -> None:
        """Connect, and read the first frame."""
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        """Whether no frame will follow."""
        return self._error is not None

    def frame(self) -> Frame:
        """Return the newest frame, once there is one.

        Raises:
            TorchperfdError: There is none: no daemon answers, or it refuses.
        """
        self._has_answer.wait()
        if self._error is not None:
            raise self._error
        assert self._frame is not None, "there is an answer"
        return self._frame

    def go_on(self, changed: Callable[[], None]) -> None:
        """Read further frames; the first one is on the screen.

        Args:
            changed: Called after each, and at an end by an exception, by the thread that reads.
        """
        self._changed = changed
        self._is_open.set()

    def stop(self) -> None:
        """Read nothing any more."""
        self._changed = _nothing
        self._stopped.set()
        self._is_open.set()

    def _run(self) -> None:
        try:
            self._follow()
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._has_answer.set()
            self._changed()

    def _follow(self) -> None:
        while not self._stopped.is_set():
            try:
                with self._scope.connect(self._socket, of_ranks=True) as daemon:
                    self._read(daemon)
            except TorchperfdError as error:
                if self._frame is None:
                    self._error = error
                    return
                self._publish(replace(self._frame, problem=str(error), clock=_clock()))
                self._stopped.wait(_EVERY_S)

    def _read(self, daemon: Any) -> None:
        if self._frame is None:
            self._scope = self._scope.whole(daemon)
        reader = Reader(daemon, self._scope, self._throughput)
        if self._frame is None:
            self._publish(reader.first())
            # The imports of the next frame would delay the first drawing.
            self._is_open.wait()
        while not self._stopped.is_set():
            due = time.monotonic() + _EVERY_S
            if not self.is_paused:
                self._publish(reader.read())
            self._stopped.wait(max(0.0, due - time.monotonic()))

    def _publish(self, frame: Frame) -> None:
        self._frame = frame
        self._has_answer.set()
        self._changed()


def _nothing() -> None:
    """Do nothing."""


def _clock() -> str:
    return time.strftime("%H:%M:%S")
