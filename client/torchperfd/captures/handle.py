"""The handle of a capture: what a script holds of one it has started."""

import os
import subprocess
from pathlib import Path

from torchperfd.captures.capture import RankCapture
from torchperfd.errors import CaptureError, CaptureTimeoutError
from torchperfd.model.own_commands import own_command
from torchperfd.v1.variables import known_environment


class Capture:
    """A capture in progress; training goes on meanwhile."""

    def __init__(self, capture: RankCapture) -> None:
        self._capture = capture

    @property
    def id(self) -> str:
        """The capture's name, as ``torchperfd captures`` shows it."""
        return self._capture.capture_id

    @property
    def state(self) -> str:
        """One of queued, preparing, ready, armed, running, exporting, complete, failed."""
        return self._capture.stage.value

    @property
    def step_range(self) -> tuple[int, int]:
        """First training step of the capture, and the first one after it."""
        start = self._capture.start_step
        return start, start + self._capture.options.steps

    def wait(self, timeout: float | None = 60.0) -> Path:
        """Wait for the trace, from a thread that does not train; return where it is.

        Raises:
            CaptureError: The capture failed; the message has the reason.
            CaptureTimeoutError: It did not end within ``timeout`` seconds.
        """
        if not self._capture.ended.wait(timeout):
            raise CaptureTimeoutError(
                f"capture {self.id} is still {self.state} after {timeout} s; do training steps go on?"
            )
        return self.path

    @property
    def pause_seconds(self) -> float:
        """How long training pauses when the capture ends: estimated, afterwards measured; 0 if unknown."""
        return self._capture.pause_seconds

    @property
    def path(self) -> Path:
        """The trace file.

        Raises:
            CaptureError: There is none, or not yet.
        """
        outcome = self._capture.outcome
        if outcome is None:
            raise CaptureError(f"capture {self.id} is {self.state}; wait() for it")
        if not outcome.ok:
            raise CaptureError(f"capture {self.id} failed: {outcome.reason}")
        return self._capture.directory / outcome.file

    @property
    def paths(self) -> dict[int, Path]:
        """The trace by this process's rank; empty while there is none."""
        outcome = self._capture.outcome
        return {self._capture.rank: self.path} if outcome is not None and outcome.ok else {}

    def report(self) -> str:
        """Return the output of ``torchperfd analyze`` for the trace; runs it as a process of its own.

        Raises:
            CaptureError: There is no trace, or it cannot be read.
        """
        return analysis_of(self.path)

    def cancel(self) -> None:
        """Give the capture up."""
        self._capture.cancel("cancelled by the script")


def analysis_of(path: Path, timeout: float | None = None) -> str:
    """Return the output of ``torchperfd analyze`` for a trace or a directory of traces.

    Raises:
        CaptureError: It cannot be read, or not within ``timeout`` seconds.
    """
    command = own_command("torchperfd", "analyze", str(path))
    try:
        done = subprocess.run(
            command,
            env=known_environment(os.environ),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        raise CaptureError(f"{path} could not be read within {timeout} s") from error
    if done.returncode:
        raise CaptureError(done.stderr.strip())
    return done.stdout
