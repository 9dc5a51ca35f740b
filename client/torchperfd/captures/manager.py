"""The capture manager, and the handle of a capture that a script holds.

The manager handles commands for captures of this process, and converts capture messages.
"""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchperfd.captures.files import CapturesDirectory
from torchperfd.errors import CaptureError, CaptureTimeoutError
from torchperfd.link.outbox import Outbox
from torchperfd.model.identity import Identity
from torchperfd.model.own_commands import own_command
from torchperfd.safety.interrupts import Flag, import_apart
from torchperfd.safety.logs import log
from torchperfd.steps.replay import Replay
from torchperfd.v1.contract import new_capture_id
from torchperfd.v1.variables import known_environment

if TYPE_CHECKING:
    from torchperfd.captures.capture import RankCapture
    from torchperfd.captures.state import CaptureOptions, CaptureOutcome, PauseEstimate
    from torchperfd.v1 import session_pb2


class Capture:
    """A capture in progress; training goes on meanwhile."""

    def __init__(self, capture: "RankCapture") -> None:
        self._capture = capture

    @property
    def id(self) -> str:
        """The capture's name, as ``torchperfd captures`` shows it."""
        return self._capture.capture_id

    @property
    def state(self) -> str:
        """One of queued, preparing, ready, armed, running, exporting, complete, failed."""
        return self._capture.state.stage.value

    @property
    def step_range(self) -> tuple[int, int]:
        """First training step of the capture, and the first one after it."""
        state = self._capture.state
        return state.start_step, state.start_step + state.options.steps

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
        return self._capture.state.pause_seconds

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


def load_options() -> "type[CaptureOptions]":
    """Return the class of a capture's options, once all that makes captures is imported.

    Only a process that captures pays for that.
    """
    import_apart("torchperfd.captures.capture")
    from torchperfd.captures.state import CaptureOptions

    return CaptureOptions


def result_message(
    capture: "RankCapture", outcome: "CaptureOutcome", *, self_started: bool
) -> "session_pb2.ClientMessage":
    """Pack how a capture of this rank ended."""
    from torchperfd.v1 import session_pb2

    state = capture.state
    result = session_pb2.CaptureResult(
        capture_id=capture.capture_id,
        ok=outcome.ok,
        reason=outcome.reason,
        retry=outcome.retry,
        start_step=outcome.start_step,
        steps=state.options.steps,
        steps_made=state.steps_made,
        file=outcome.file,
        bytes=outcome.bytes,
        sha256=outcome.sha256,
        self_started=self_started,
        options=state.options.to_message(),
        pause_seconds=state.pause_seconds,
        launches=state.launches,
        kernels=state.kernels,
    )
    return session_pb2.ClientMessage(capture_result=result)


_SCRIPT: Final = "script"
_TORCH_BUDGET_S: Final = 15.0
_PREVIOUS_BUDGET_S: Final = 15.0
"""How long an order of the daemon waits for a capture that is about to end; the daemon waits for 20 s."""
_SILENT_S: Final = 0.5
_EXPORT_BUDGET_S: Final = 60.0
"""Longest delay of an exit by the export of a trace."""


@dataclass(frozen=True, slots=True)
class CaptureTarget:
    """What captures of this process record: its loop.

    Attributes:
        step_seconds: Returns how long training steps take lately, 0 before the first.
        phase_name: Returns the name of a phase's slot.
        own_facts: Returns what else the client knows of steps that nothing records, for traces.
    """

    replay: Replay
    identity: Identity
    step_seconds: Callable[[], float]
    phase_name: Callable[[int], str]
    own_facts: Callable[[], Mapping[str, Any]] = dict


class CaptureManager:
    """Starts captures for the daemon and for the script; one at a time."""

    def __init__(self, target: CaptureTarget, outbox: "Outbox[session_pb2.ClientMessage]") -> None:
        self._target = target
        self._loop = target.replay.loop
        self._outbox = outbox
        self._capture: RankCapture | None = None
        # A capture of the run's own that the script's waits for.
        self._automatic: RankCapture | None = None
        # Reentrant, as the other locks that a script reaches: a signal handler may come to it again.
        self._lock = threading.RLock()
        self._is_admitting = False
        self._own: set[str] = set()
        self._pauses: PauseEstimate | None = None
        self.directory = CapturesDirectory()
        """Directory for captures of this process."""
        self.newest_id = ""
        """The id of the newest capture that this process has completed; empty before the first."""
        self.torch_ready = Flag()
        """Set once the script has imported torch: a thread of ours that imports parts of it
        at the same time can break both."""

    def start(self, options: "CaptureOptions") -> "RankCapture":
        """Capture the next steps for the script itself, those after a capture that the run makes by itself.

        Raises:
            CaptureError: Another capture is in progress.
        """
        capture_id = new_capture_id(time.time())
        folder = self.directory.folder(capture_id)
        capture = self._admit(capture_id, folder, options, trigger=_SCRIPT)
        if capture is None:
            raise CaptureError("another capture is in progress; wait for it")
        self._own.add(capture_id)
        automatic = self._automatic
        if automatic is not None:
            log.info("capture %s begins when the run's automatic capture has ended", capture_id)

        def prepare_and_arm() -> None:
            if automatic is not None:
                capture.wait_for(automatic)
            if capture.state.is_ending:
                return
            reason = self._not_ready() or capture.prepare()
            if reason:
                capture.fail(reason)
            else:
                capture.arm()

        threading.Thread(target=prepare_and_arm, name="torchperfd-capture", daemon=True).start()
        return capture

    def handle_command(self, message: "session_pb2.DaemonMessage") -> None:
        """Act on a message of the daemon; one that is not about captures is ignored."""
        body = message.WhichOneof("body")
        if body == "prepare_capture":
            threading.Thread(
                target=self._prepare, args=(message.prepare_capture,), name="torchperfd-capture", daemon=True
            ).start()
        elif body == "commit_capture":
            capture = self._named(message.commit_capture.capture_id)
            if capture is not None:
                capture.arm(message.commit_capture.start_step, message.commit_capture.steps)
        elif body == "cancel_capture":
            capture = self._named(message.cancel_capture.capture_id)
            if capture is not None:
                capture.cancel(message.cancel_capture.reason)

    def loop_ended(self) -> None:
        """No more edges will come: end captures, or wait up to 60 s for a trace to be written."""
        for capture in self._in_progress():
            capture.loop_ended()
        for capture in self._in_progress():
            # Not once the trace is being written: that may leave no thread the time to state it.
            if capture.state.pause_seconds < _SILENT_S and capture.ended.wait(_SILENT_S):
                continue
            log.warning(
                "waiting up to %.0f s for the trace of capture %s to be written; Ctrl-C skips it",
                _EXPORT_BUDGET_S,
                capture.capture_id,
            )
            if not capture.ended.wait(_EXPORT_BUDGET_S):
                capture.fail("the process ended before the trace was written")

    def give_up(self, reason: str) -> None:
        """Wait for no trace any more."""
        for capture in self._in_progress():
            capture.fail(reason)

    def _in_progress(self) -> "list[RankCapture]":
        captures = (self._automatic, self._capture)
        return [each for each in captures if each is not None and not each.ended.is_set()]

    def _named(self, capture_id: str) -> "RankCapture | None":
        return next((each for each in self._in_progress() if each.capture_id == capture_id), None)

    def _prepare(self, order: "session_pb2.PrepareCapture") -> None:
        from torchperfd.captures.state import CaptureOptions
        from torchperfd.v1 import session_pb2

        reason, pause_seconds = "", 0.0
        self.torch_ready.wait(_TORCH_BUDGET_S)
        previous = self._capture
        if previous is not None and (previous.state.is_ending or previous.state.options.automatic):
            # The daemon has done with it sooner than this process, or another node's daemon conducts.
            previous.ended.wait(_PREVIOUS_BUDGET_S)
        try:
            if self.directory.refusal:
                raise ValueError(self.directory.refusal)
            wanted = CaptureOptions.from_message(order.options)
            folder = self.directory.folder(order.capture_id, order.directory)
            capture = self._admit(order.capture_id, folder, wanted, order.max_bytes)
        except ValueError as error:
            reason = str(error)
            log.warning("capture refused: %s", reason)
        else:
            if capture is None:
                reason = "another capture is in progress in this process"
            else:
                reason = self._not_ready() or capture.prepare()
                pause_seconds = capture.state.pause_seconds / capture.state.options.steps
                if reason:
                    # The ack below reports it; no outcome is expected.
                    self._capture = None
        ack = session_pb2.CaptureAck(
            capture_id=order.capture_id,
            ready=not reason,
            reason=reason,
            next_step=self._loop.train_steps,
            step_seconds=self._target.step_seconds(),
            pause_seconds_per_step=pause_seconds,
        )
        self._outbox.put(session_pb2.ClientMessage(capture_ack=ack))

    def _not_ready(self) -> str:
        return "" if self.torch_ready.is_set() else "the process has not imported torch yet"

    def _admit(
        self,
        capture_id: str,
        directory: Path,
        options: "CaptureOptions",
        max_bytes: int = 0,
        trigger: str = "command",
    ) -> "RankCapture | None":
        from torchperfd.captures.capture import RankCapture
        from torchperfd.captures.state import PauseEstimate

        with self._lock:
            before = self._in_progress()
            may_wait = trigger == _SCRIPT and all(each.state.options.automatic for each in before)
            if self._is_admitting or (before and not may_wait):
                return None
            self._is_admitting = True
            try:
                self._automatic = before[0] if before else None
                self._pauses = self._pauses or PauseEstimate()
                self._capture = RankCapture(
                    self._target,
                    capture_id=capture_id,
                    directory=directory,
                    options=options,
                    on_outcome=self._report_outcome,
                    max_bytes=max_bytes,
                    trigger=trigger,
                    handover=(lambda: self.directory.handover) if self.directory.handover else None,
                    keeps=trigger == _SCRIPT,
                    pauses=self._pauses,
                )
            finally:
                self._is_admitting = False
            return self._capture

    def _report_outcome(self, capture: "RankCapture", outcome: "CaptureOutcome") -> None:
        if outcome.ok:
            self.newest_id = capture.capture_id
        self._outbox.put(result_message(capture, outcome, self_started=capture.capture_id in self._own))
