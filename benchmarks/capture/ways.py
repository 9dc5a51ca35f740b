"""The ways out of torch's profiler: what each does on the training thread, and where it writes the trace.

All but the last are here for comparison only; ``docs/captures.md`` has the reasons.
"""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from torch.autograd import profiler

import torchperfd
from torchperfd.captures.manager import Capture

WAITING: Final = "waiting"
RUNNING: Final = "running"
ENDING: Final = "ending"
DONE: Final = "done"


class Way(Protocol):
    def begin(self, steps: int, directory: Path) -> None:
        """Capture that many of the next steps, into files somewhere below a directory."""

    def step(self) -> str:
        """A step has ended: act, and return how far the capture is."""

    def close(self) -> None:
        """Leave the process as it was."""


class ByHand:
    """Torch's profiler, stopped by the loop; the trace is written wherever ``export`` likes."""

    trace_only = False

    def __init__(self) -> None:
        self._left = 0
        self._path = Path()
        self._profiler: Any = None
        self._work: threading.Thread | None = None

    def begin(self, steps: int, directory: Path) -> None:
        """Start with the next step."""
        self._left = steps
        self._path = directory / "trace.json"
        self._start()

    def step(self) -> str:
        """Count; stop after the last."""
        if self._left:
            self._left -= 1
            if self._left:
                return RUNNING
            self._stop()
        return ENDING if self._writing() else DONE

    def close(self) -> None:
        """Nothing is left."""

    def export(self) -> None:
        """Write on the training thread."""
        self._profiler.export_chrome_trace(str(self._path))
        self._profiler = None

    def _start(self) -> None:
        from torch._C._profiler import _ExperimentalConfig

        config = _ExperimentalConfig(trace_only=self.trace_only)
        self._profiler = profiler.profile(use_kineto=True, experimental_config=config)
        self._profiler.__enter__()

    def _stop(self) -> None:
        self._profiler.__exit__(None, None, None)
        self.export()

    def _writing(self) -> bool:
        return self._work is not None and self._work.is_alive()

    def _elsewhere(self, work: Callable[[], None]) -> None:
        self._work = threading.Thread(target=work)
        self._work.start()


class OtherThread(ByHand):
    """Stopped by the loop, written by a thread."""

    def export(self) -> None:
        """Write on a thread of its own."""
        self._elsewhere(super().export)


class TraceOnly(OtherThread):
    """The same, less what only ``events()`` needs."""

    trace_only = True


class Fork(TraceOnly):
    """Stopped by the loop, written by a forked child."""

    def export(self) -> None:
        """Fork; a thread waits for the child and then frees the parent's copy."""
        child = os.fork()
        if not child:
            try:
                self._profiler.export_chrome_trace(str(self._path))
            finally:
                os._exit(0)

        def wait() -> None:
            os.waitpid(child, 0)
            self._profiler = None

        self._elsewhere(wait)


class Chunks(ByHand):
    """Ten small traces, one after the other, each stopped and written at a step's edge."""

    trace_only = True
    parts: Final = 10

    def begin(self, steps: int, directory: Path) -> None:
        self._part = max(1, steps // self.parts)
        super().begin(steps, directory)

    def step(self) -> str:
        """Count; stop after each part, start the next with the same step."""
        last = self._left == 1
        state = super().step()
        if state == RUNNING and self._left % self._part == 0:
            self._stop()
            self._path = self._path.with_name(f"trace-{self._left}.json")
            self._start()
            # The gap lies within the capture, but it is an end like any other.
            return ENDING
        return ENDING if last else state


class Shipped:
    """What ``client.capture()`` does."""

    def __init__(self) -> None:
        self._client = torchperfd.attach()
        self._capture: Capture | None = None

    def begin(self, steps: int, directory: Path) -> None:
        # As a daemon's welcome would say it.
        self._client.parts.captures.directory.on_welcome(str(directory.absolute()), None, os.geteuid())
        self._capture = self._client.capture(steps)

    def step(self) -> str:
        """Look how far it is."""
        assert self._capture is not None
        state = self._capture.state
        if state == "failed":
            self._capture.wait(1)  # raises, with the reason
        if state in ("running", "complete"):
            return RUNNING if state == "running" else DONE
        return ENDING if state == "exporting" else WAITING

    def close(self) -> None:
        self._client.detach()


WAYS: Final[dict[str, Callable[[], Way]]] = {
    "by hand": ByHand,
    "other thread": OtherThread,
    "trace only": TraceOnly,
    "forked child": Fork,
    "ten chunks": Chunks,
    "torchperfd": Shipped,
}


def events(path: Path) -> int:
    return len(json.loads(path.read_bytes())["traceEvents"])
