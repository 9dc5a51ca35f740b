"""The capture desk: where orders for captures arrive, and what a script holds of one it ordered."""

import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchperfd.capture import MEMORY, TRACE, CaptureOptions, CaptureOutcome, RankCapture
from torchperfd.capture_files import CapturesDirectory
from torchperfd.errors import CaptureError, CaptureTimeoutError
from torchperfd.flag import Flag
from torchperfd.identity import Identity
from torchperfd.logs import log
from torchperfd.outbox import Outbox
from torchperfd.replay import Replay

if TYPE_CHECKING:
    from torchperfd.v1 import session_pb2

_TORCH_BUDGET_S: Final = 15.0
_ENDING_BUDGET_S: Final = 5.0
_EXPORT_BUDGET_S: Final = 60.0
"""Longest delay of an exit by the export of a trace."""


class CaptureDesk:
    """Takes orders from the daemon and from the script; one capture at a time.

    Args:
        replay: Reads the tape of the loop whose steps are captured.
        identity: This process.
        outbox: Where acknowledgements and results go.
        step_seconds: Returns how long training steps take lately, 0 before the first.
        phase_name: Returns the name of a phase's slot.
        own_facts: Returns what else the client knows of steps that nothing records, for traces.
    """

    def __init__(
        self,
        replay: Replay,
        identity: Identity,
        outbox: "Outbox[session_pb2.ClientMessage]",
        step_seconds: Callable[[], float],
        phase_name: Callable[[int], str],
        own_facts: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._replay = replay
        self._loop = replay.loop
        self._identity = identity
        self._outbox = outbox
        self._step_seconds = step_seconds
        self._phase_name = phase_name
        self._own_facts = own_facts
        self._capture: RankCapture | None = None
        # Reentrant, as the other locks that a script reaches: a signal handler may come to it again.
        self._lock = threading.RLock()
        self._is_admitting = False
        self._own: set[str] = set()
        self.directory = CapturesDirectory()
        """Where captures of this process go."""
        self.torch_ready = Flag()
        """Set once the script has imported torch: a thread of ours that imports parts of it
        at the same time can break both."""

    def start(self, options: CaptureOptions) -> RankCapture:
        """Capture the next steps for the script itself.

        Raises:
            CaptureError: Another capture is in progress.
        """
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        capture_id = f"{stamp}-{secrets.token_hex(3)}"
        folder = self.directory.folder(capture_id)
        capture = self._admit(capture_id, folder, options, trigger="script")
        if capture is None:
            raise CaptureError("another capture is in progress; wait for it")
        self._own.add(capture_id)

        def prepare_and_arm() -> None:
            reason = self._not_ready() or capture.prepare()
            if reason:
                capture.fail(reason)
            else:
                capture.arm()

        threading.Thread(target=prepare_and_arm, name="torchperfd-capture", daemon=True).start()
        return capture

    def obey(self, message: "session_pb2.DaemonMessage") -> None:
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
        """No more edges will come: end a capture, or wait up to 60 s for its trace to be written."""
        capture = self._capture
        if capture is not None:
            capture.loop_ended()
            if not capture.ended.wait(_EXPORT_BUDGET_S):
                capture.fail(
                    f"the process ended, and the trace was not written within {_EXPORT_BUDGET_S:.0f} s"
                )

    def _named(self, capture_id: str) -> RankCapture | None:
        capture = self._capture
        return capture if capture is not None and capture.capture_id == capture_id else None

    def _prepare(self, order: "session_pb2.PrepareCapture") -> None:
        from torchperfd.v1 import session_pb2

        reason = ""
        self.torch_ready.wait(_TORCH_BUDGET_S)
        previous = self._capture
        if previous is not None and previous.ending:
            # The daemon has done with it sooner than this process.
            previous.ended.wait(_ENDING_BUDGET_S)
        try:
            wanted = _options(order.options)
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
                if reason:
                    # The daemon hears of it by the ack below; nobody waits for an outcome.
                    self._capture = None
        ack = session_pb2.CaptureAck(
            capture_id=order.capture_id,
            ready=not reason,
            reason=reason,
            next_step=self._loop.train_steps,
            step_seconds=self._step_seconds(),
        )
        self._outbox.put(session_pb2.ClientMessage(capture_ack=ack))

    def _not_ready(self) -> str:
        return "" if self.torch_ready.is_set() else "the process has not imported torch yet"

    def _admit(
        self,
        capture_id: str,
        directory: Path,
        options: CaptureOptions,
        max_bytes: int = 0,
        trigger: str = "command",
    ) -> RankCapture | None:
        with self._lock:
            busy = self._capture is not None and not self._capture.ended.is_set()
            if busy or self._is_admitting:
                return None
            self._is_admitting = True
            try:
                self._capture = RankCapture(
                    replay=self._replay,
                    identity=self._identity,
                    capture_id=capture_id,
                    directory=directory,
                    options=options,
                    step_seconds=self._step_seconds,
                    own_facts=self._own_facts,
                    on_outcome=self._report_outcome,
                    phase_name=self._phase_name,
                    max_bytes=max_bytes,
                    trigger=trigger,
                    owners=self.directory.owners,
                )
            finally:
                self._is_admitting = False
            return self._capture

    def _report_outcome(self, capture: RankCapture, outcome: CaptureOutcome) -> None:
        from torchperfd.v1 import session_pb2

        options = capture.options
        result = session_pb2.CaptureResult(
            capture_id=capture.capture_id,
            ok=outcome.ok,
            reason=outcome.reason,
            retry=outcome.retry,
            start_step=outcome.start_step,
            steps=options.steps,
            steps_made=capture.steps_made,
            file=outcome.file,
            bytes=outcome.bytes,
            sha256=outcome.sha256,
            self_started=capture.capture_id in self._own,
            options=options_message(options),
        )
        self._outbox.put(session_pb2.ClientMessage(capture_result=result))


def _options(message: "session_pb2.CaptureOptions") -> CaptureOptions:
    """Unpack what to record.

    Raises:
        ValueError: There is no such capture.
    """
    from torchperfd.v1 import session_pb2

    kinds = {
        session_pb2.CAPTURE_KIND_UNSPECIFIED: TRACE,
        session_pb2.CAPTURE_KIND_TRACE: TRACE,
        session_pb2.CAPTURE_KIND_MEMORY: MEMORY,
    }
    return CaptureOptions(
        steps=message.steps,
        record_shapes=message.record_shapes,
        with_stack=message.with_stack,
        profile_memory=message.profile_memory,
        # A newer daemon may know more of them.
        kind=kinds.get(message.kind, str(message.kind)),
        with_flops=message.with_flops,
        with_modules=message.with_modules,
    )


def options_message(options: CaptureOptions) -> "session_pb2.CaptureOptions":
    """Pack what was recorded."""
    from torchperfd.v1 import session_pb2

    return session_pb2.CaptureOptions(
        steps=options.steps,
        record_shapes=options.record_shapes,
        with_stack=options.with_stack,
        profile_memory=options.profile_memory,
        kind=(session_pb2.CAPTURE_KIND_MEMORY if options.kind == MEMORY else session_pb2.CAPTURE_KIND_TRACE),
        with_flops=options.with_flops,
        with_modules=options.with_modules,
    )


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
        """One of preparing, ready, armed, running, exporting, complete, failed."""
        return self._capture.stage.value

    @property
    def step_range(self) -> tuple[int, int]:
        """First training step of the capture, and the first one after it."""
        start = self._capture.start_step
        return start, start + self._capture.options.steps

    def wait(self, timeout: float | None = 60.0) -> Path:
        """Wait for the trace, from a thread that does not train; return where it is.

        Raises:
            CaptureError: The capture failed; the message says why.
            CaptureTimeoutError: It did not end within ``timeout`` seconds.
        """
        if not self._capture.ended.wait(timeout):
            raise CaptureTimeoutError(
                f"capture {self.id} is still {self.state} after {timeout} s; do training steps go on?"
            )
        return self.path

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
        """Return what ``torchperfd analyze`` says of the trace; runs it as a process of its own.

        Raises:
            CaptureError: There is no trace, or it cannot be read.
        """
        return analysis_of(self.path)

    def cancel(self) -> None:
        """Give the capture up."""
        self._capture.cancel("cancelled by the script")


def analysis_of(path: Path) -> str:
    """Return what ``torchperfd analyze`` says of a trace or a directory of them.

    Raises:
        CaptureError: It cannot be read.
    """
    command = [sys.executable, "-m", "torchperfd", "analyze", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CaptureError(done.stderr.strip())
    return done.stdout
