"""Captures: torch.profiler over an agreed range of training steps, in this process.

Profilers are switched on and off on the training thread, at step edges, by a ``CaptureDriver``; what an edge
means is decided by a ``CaptureState``. Everything else (checks, export, hashing, clearing up) happens on
threads of its own.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from torchperfd.captures import rank_files, tracer
from torchperfd.captures.driver import CaptureDriver, unusable
from torchperfd.captures.files import Handover
from torchperfd.captures.manager import CaptureTarget
from torchperfd.captures.rank_files import NotWrittenError, RankFiles, rank_manifest
from torchperfd.captures.state import (
    Action,
    CaptureOptions,
    CaptureOutcome,
    CaptureStage,
    CaptureState,
    PauseEstimate,
    warning,
)
from torchperfd.model.capture_options import CaptureKind
from torchperfd.safety.interrupts import Flag, is_from_script
from torchperfd.safety.logs import log

_ARM_TIMEOUT_S: Final = 30.0
"""How long a prepared capture waits for its steps."""


class RankCapture:
    """One capture of this rank, from preparation to a trace on disk. A ``StepWatcher``.

    Args:
        capture_id: Name of the capture, the same on all ranks.
        directory: Where its files go; made when missing.
        on_outcome: Called once, when the capture has ended, from one of several threads.
        max_bytes: Largest trace that is kept; 0 for any.
        trigger: What asked for it, for the manifest.
        handover: Returns the session with the service that takes the files over, None while there is none;
            None itself if no service does.
        keeps: Keep the files here as well when a service has taken them.
        pauses: What is known of pauses in this process; the capture adds to it.
    """

    def __init__(
        self,
        target: CaptureTarget,
        *,
        capture_id: str,
        directory: Path,
        options: CaptureOptions,
        on_outcome: Callable[["RankCapture", CaptureOutcome], None],
        max_bytes: int = 0,
        trigger: str = "command",
        handover: Callable[[], Handover | None] | None = None,
        keeps: bool = True,
        pauses: PauseEstimate | None = None,
    ) -> None:
        self.capture_id = capture_id
        self.directory = directory
        self.ended = Flag()
        self.rank = target.identity.rank
        self._target = target
        self._replay = target.replay
        self._on_outcome = on_outcome
        self._trigger = trigger
        self._pauses = pauses or PauseEstimate()
        self.state = CaptureState(options)
        self._driver = CaptureDriver(target.replay, target.phase_name)
        self._files = RankFiles(directory, self.rank, options.kind, max_bytes)
        self._handover = handover
        self._keeps = keeps or handover is None
        self._ending = threading.RLock()
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="torchperfd-export", daemon=True)
        self._ordered = False
        self._deadline: threading.Timer | None = None
        self._watches_profilers = False

    @property
    def file(self) -> str:
        """Name of this rank's file below the capture's directory."""
        return self._files.trace

    @property
    def outcome(self) -> CaptureOutcome | None:
        """How it ended; None before that."""
        return self.state.outcome

    # On a thread of its own.

    def wait_for(self, previous: "RankCapture") -> None:
        """Wait until another capture has ended, which may take until its steps are made."""
        self._move_to(CaptureStage.QUEUED)
        previous.ended.wait(None)
        self._move_to(CaptureStage.PREPARING)

    def _move_to(self, stage: CaptureStage) -> None:
        with self._ending:
            if self.outcome is None:
                self.state.stage = stage

    def prepare(self, timeout: float = _ARM_TIMEOUT_S) -> str:
        """Do ahead of time all that would stall a step or fail late; return the reason of a failure, or ''.

        Args:
            timeout: Seconds after which the capture fails unless it has been armed.
        """
        reason = unusable(self.state.options) or self._files.prepare()
        if reason:
            return reason
        if self.state.options.kind == CaptureKind.TRACE:
            reason = tracer.prepare()
            # Not before: an end meanwhile would find nothing to leave yet, and leave nothing later.
            self._watches_profilers = True
            if reason:
                self._leave_profilers()
                return reason
        # Here, as starting a thread would be too much at an edge.
        self._worker.start()
        # Of steps before this capture costs them anything.
        self._driver.unrecorded_step_ns = round(self._target.step_seconds() * 1e9)
        self._driver.own_facts = self._target.own_facts()
        if self.state.options.kind == CaptureKind.TRACE:
            self._pauses.count_nodes(self._replay, self._target.step_seconds())
        # From here on the number of the newest step must be exact, not as old as the last flush.
        self._replay.go_live()
        self.state.stage = CaptureStage.READY
        self.state.pause_seconds = self._pauses.seconds(self.state.options)
        # The process that asked may be gone, and reading along costs every step.
        self._deadline = threading.Timer(timeout, self._lapse)
        self._deadline.name = "torchperfd-capture-deadline"
        self._deadline.daemon = True
        self._deadline.start()
        if self.outcome is not None:
            # It was cancelled meanwhile, when there was nothing of this to undo.
            self.state.stage = CaptureStage.FAILED
            self._undo()
            self._let_go()
            reason = self.outcome.reason
        return reason

    def arm(self, start_step: int | None = None, steps: int = 0) -> None:
        """Profile the training steps [start_step, start_step + steps) once the loop gets there.

        Args:
            start_step: The first one; None for whichever begins next, where no other rank has to agree.
            steps: Number of steps; 0 for the number in the options.

        Raises:
            ValueError: No capture has so many.
        """
        self.state.agree(start_step, steps)
        self._forget_deadline()
        if self.ended.is_set():
            return
        if start_step is not None and self._replay.loop.train_steps >= start_step:
            self.fail(f"step {start_step} was already under way", retry=True)
            return
        self.state.pause_seconds = self._pauses.seconds(self.state.options)
        text = warning(self.state.pause_seconds, self.state.options)
        # The daemon keeps the pause of the run's own capture short.
        if text and not self.state.options.automatic:
            log.warning("capture %s: %s", self.capture_id, text)
        self.state.stage = CaptureStage.ARMED
        self._replay.watch(self)

    def cancel(self, reason: str) -> None:
        """Give up: at once when not yet running, else at the next step edge."""
        self.state.cancel_reason = reason
        if self.state.can_end_at_once:
            self.fail(reason)

    # On the training thread.

    def train_edge(self, next_index: int) -> None:
        decision = self.state.train_edge(next_index)
        if self._driver.is_lost:
            self._give_up(str(tracer.LostTraceError()))
            return
        if self.state.is_recording:
            self._driver.close_annotations()
        match decision.action:
            case Action.START:
                self._start(next_index)
            case Action.CONTINUE:
                self._driver.annotate(next_index)
            case Action.STOP:
                self._stop()
            case Action.GIVE_UP:
                self._give_up(decision.reason, retry=decision.retry)
            case Action.UNWATCH:
                self._replay.unwatch(self)

    def validate_edge(self) -> None:
        """Go on through a short validation; give up in a long one."""
        decision = self.state.validate_edge()
        if decision.action is Action.GIVE_UP:
            self._give_up(decision.reason, retry=decision.retry)

    def loop_ended(self) -> None:
        """The loop is over: no more edges will come."""
        if self.state.is_recording:
            done = self._replay.loop.train_steps - self.state.start_step
            self._give_up(f"training ended after {done} of {self.state.options.steps} steps")
        elif self.outcome is None and not self._ordered:
            self.fail("training ended before the chosen steps")

    def _start(self, index: int) -> None:
        try:
            reason = self._driver.start(self.state.options)
        except BaseException as error:  # a signal handler of the script
            self._give_up(f"torch's profiler did not start: {error}")
            raise
        if reason:
            self._give_up(reason)
            return
        self.state.is_recording = True
        self.state.stage = CaptureStage.RUNNING
        self._driver.annotate(index)

    def _stop(self) -> None:
        self.state.is_recording = False
        trace = self._driver.release()
        assert trace is not None
        self._replay.unwatch(self)
        self.state.stage = CaptureStage.EXPORTING
        began = time.perf_counter()
        try:
            trace.stop()
        except BaseException as error:
            reason = f"torch's profiler did not stop: {error}"
            if is_from_script(error):
                self._order(partial(self._clear_up, trace, reason, True))
                raise
            self._order(partial(self.fail, reason))
            return
        self._order(partial(self._export, trace, time.perf_counter() - began))

    def _give_up(self, reason: str, *, retry: bool = False) -> None:
        self.state.is_recording = False
        trace = self._driver.release()
        self._replay.unwatch(self)
        try:
            self._driver.end(trace)
        except BaseException as error:
            if is_from_script(error):
                raise
            log.debug("torch's profiler did not stop cleanly: %s", error)
            trace = None
        finally:
            self._order(partial(self._clear_up, trace, reason, retry))

    def _order(self, work: Callable[[], None]) -> None:
        # An edge may lie within an operator of the script's: whatever is done here lengthens it.
        self._ordered = True
        self._orders.put(work)

    # On the export thread.

    def _work(self) -> None:
        order = self._orders.get()
        if order is not None:
            order()

    def _clear_up(self, trace: tracer.Tracer | None, reason: str, retry: bool) -> None:
        try:
            if trace is not None:
                trace.discard()
        except Exception as error:  # noqa: BLE001
            log.debug("a trace was not discarded cleanly: %s", error)
        # Not before: the next capture may start as soon as this one has ended.
        self.fail(reason, retry=retry)

    def _export(self, trace: tracer.Tracer, stopping_seconds: float) -> None:
        try:
            written = self._files.write_trace(trace, lambda: self.state.refusal)
        except NotWrittenError as error:
            self.fail(str(error))
            return
        self.state.pause_seconds = stopping_seconds + written.export_seconds
        self._pauses.learn_pause(self.state.pause_seconds, self.state.options)
        self.state.launches, self.state.kernels = written.launches, written.kernels
        rank_files.warn_of_missing_kernels(self.capture_id, written.launches, written.kernels)
        outcome = CaptureOutcome(
            ok=True,
            start_step=self.state.start_step,
            file=self.file,
            bytes=written.bytes,
            sha256=written.sha256,
        )
        if self._handover is not None:
            try:
                self._write_manifest(outcome)
                self._files.hand_over(self._handover)
            except (NotWrittenError, OSError) as error:
                if not self._keeps:
                    self.fail(str(error))
                    return
                log.warning("capture %s: %s", self.capture_id, error)
        self._end(outcome)

    def _write_manifest(self, outcome: CaptureOutcome) -> None:
        manifest = rank_manifest(self.capture_id, self._trigger, self._target.identity, self.state, outcome)
        self._files.write_manifest(manifest)

    # On any thread.

    def _lapse(self) -> None:
        if self.state.stage is CaptureStage.READY:
            self.fail("no start step came within the time given; capture again")

    def _undo(self) -> None:
        self._replay.unwatch(self)
        self._files.remove_leftovers()

    def _let_go(self) -> None:
        self._forget_deadline()
        self._leave_profilers()

    def _leave_profilers(self) -> None:
        if self._watches_profilers:
            self._watches_profilers = False
            tracer.end()

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def fail(self, reason: str, *, retry: bool = False) -> None:
        """End without a trace; ``retry`` when another attempt may well succeed."""
        self._undo()
        self._end(CaptureOutcome(ok=False, reason=reason, retry=retry, start_step=self.state.start_step))

    def _end(self, outcome: CaptureOutcome) -> None:
        with self._ending:
            if self.outcome is not None:
                return
            self.state.end(outcome)
        self._let_go()
        self._orders.put(None)
        try:
            if self._keeps:
                self._write_manifest(outcome)
            elif outcome.ok or not self._files.has_trace:
                # A trace that the service has not taken stays, with the manifest beside it.
                self._files.remove()
        except OSError as error:
            log.warning("cannot write the manifest of capture %s: %s", self.capture_id, error)
        try:
            self._on_outcome(self, outcome)
        finally:
            self.ended.set()
