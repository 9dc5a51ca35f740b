"""Captures: torch.profiler over an agreed range of training steps, in this process.

torch's profiler records nothing when it is started from another thread, and may
crash when two run at once. So it is started and stopped on the training thread,
at step edges; everything else (checks, export, hashing, clearing up) happens on
threads of its own.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, Final

from torchperfd import memory_snapshot, tracer
from torchperfd._version import __version__
from torchperfd.annotations import Annotations
from torchperfd.capture_files import CaptureFolder
from torchperfd.flag import Flag
from torchperfd.identity import Identity
from torchperfd.interrupts import is_from_script
from torchperfd.logs import log
from torchperfd.replay import Replay

TRACE: Final = "trace"
MEMORY: Final = "memory"
KINDS: Final = (TRACE, MEMORY)
"""What a capture can be."""

_MOST_STEPS: Final = 1000
_FOREIGN_STEPS_ALLOWED: Final = 10
_TAIL_BYTES: Final = 8192
_BELOW_DESCRIPTOR: Final = re.compile(r"/proc/self/fd/\d+/")
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')
_PATIENCE_S: Final = 30.0
"""How long after it was prepared a capture waits to be told its steps."""


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What shall be captured, and for how many training steps.

    Attributes:
        steps: How many training steps.
        kind: ``trace``, by torch.profiler, or ``memory``, a snapshot of CUDA memory and its history.
    """

    steps: int = 5
    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False
    kind: str = TRACE
    with_flops: bool = False
    with_modules: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= _MOST_STEPS:
            raise ValueError(f"steps must be 1 to {_MOST_STEPS}, not {self.steps}")
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {self.kind!r}")


class CaptureStage(Enum):
    """How far a capture in this process is."""

    PREPARING = "preparing"
    READY = "ready"
    ARMED = "armed"
    RUNNING = "running"
    EXPORTING = "exporting"
    COMPLETE = "complete"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class CaptureOutcome:
    """How a capture of this rank ended.

    Attributes:
        ok: A whole trace of all agreed steps is on disk.
        reason: Why not, in one line; empty when ok.
        start_step: First training step of the range, counting from 0.
        file: Name of the trace below the capture's directory.
        bytes: Its size.
        sha256: Its hash, in hexadecimal.
        retry: It failed only because the moment was wrong.
    """

    ok: bool
    reason: str = ""
    retry: bool = False
    start_step: int = 0
    file: str = ""
    bytes: int = 0
    sha256: str = ""


class RankCapture:
    """One capture of this rank, from preparation to a trace on disk. A ``StepWatcher``.

    Args:
        replay: Reads the tape of the loop whose steps are captured.
        identity: Written into the manifest.
        capture_id: Name of the capture, the same on all ranks.
        directory: Where its files go; made when missing.
        options: What to record.
        step_seconds: Returns how long training steps take lately, 0 before the first.
        own_facts: Returns what else the client knows of steps that nothing records, for the trace.
        on_outcome: Called once, when the capture has ended, from one of several threads.
        phase_name: Returns the name of a phase's slot.
        max_bytes: Of what is written; more is not kept. 0 for any.
        trigger: What asked for it, as the manifest shall say.
        owners: Users whose folder ``directory`` may be; this process's own by default.
    """

    def __init__(
        self,
        *,
        replay: Replay,
        identity: Identity,
        capture_id: str,
        directory: Path,
        options: CaptureOptions,
        step_seconds: Callable[[], float],
        on_outcome: Callable[["RankCapture", CaptureOutcome], None],
        phase_name: Callable[[int], str],
        max_bytes: int = 0,
        trigger: str = "command",
        own_facts: Callable[[], Mapping[str, Any]] = dict,
        owners: frozenset[int] | None = None,
    ) -> None:
        self.capture_id = capture_id
        self.directory = directory
        self.options = options
        self.stage = CaptureStage.PREPARING
        self.start_step = 0
        self.steps_made = 0
        """Of those agreed on, while the profiler was on."""
        self.outcome: CaptureOutcome | None = None
        self.ended = Flag()
        self._replay = replay
        self._loop = replay.loop
        self._identity = identity
        self._step_seconds = step_seconds
        self._unrecorded_step_ns = 0
        self._read_own_facts = own_facts
        self._own_facts: Mapping[str, Any] = {}
        self._on_outcome = on_outcome
        self._max_bytes = max_bytes
        self._trigger = trigger
        self._owners = frozenset({os.geteuid()}) if owners is None else owners
        self._trace: tracer.Tracer | None = None
        self._annotations = Annotations(phase_name)
        self._starts_anywhere = False
        self._foreign_steps = 0
        self._cancel_reason = ""
        self._ending = threading.RLock()
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="torchperfd-export", daemon=True)
        self._ordered = False
        self._deadline: threading.Timer | None = None

    @property
    def rank(self) -> int:
        """Of this process."""
        return self._identity.rank

    @property
    def file(self) -> str:
        """Name of this rank's file below the capture's directory."""
        suffix = "memory.pickle" if self.options.kind == MEMORY else "json"
        return f"rank{self._identity.rank}.{suffix}"

    # On a thread of its own.

    def prepare(self, patience: float = _PATIENCE_S) -> str:
        """Do ahead of time what would stall a step or fail late; return why not, or ''.

        Args:
            patience: Seconds after which the capture fails unless it has been armed.
        """
        reason = self._unusable()
        if not reason:
            try:
                with CaptureFolder.opened(self.directory, self._owners) as folder:
                    # Of an attempt before this one.
                    folder.remove(self._manifest)
                    folder.check_writable(self.file)
            except OSError as error:
                reason = f"cannot write to {self.directory}: {error.strerror or error}"
        if not reason:
            if self.options.kind == TRACE:
                tracer.prepare()
            # Here, as starting a thread would be too much at an edge.
            self._worker.start()
            # Of steps before this capture costs them anything.
            self._unrecorded_step_ns = round(self._step_seconds() * 1e9)
            self._own_facts = self._read_own_facts()
            # From here on the number of the newest step must be exact, not as old as the last flush.
            self._replay.go_live()
            self.stage = CaptureStage.READY
            # Whoever asked may be gone, and reading along costs every step.
            self._deadline = threading.Timer(patience, self._lapse)
            self._deadline.name = "torchperfd-capture-deadline"
            self._deadline.daemon = True
            self._deadline.start()
            if self.outcome is not None:
                # It was cancelled meanwhile, when there was nothing of this to undo.
                self.stage = CaptureStage.FAILED
                self._forget_deadline()
                self._replay.unwatch(self)
                self._remove_leftovers()
                reason = self.outcome.reason
        return reason

    def arm(self, start_step: int | None = None, steps: int = 0) -> None:
        """Profile the training steps [start_step, start_step + steps) once the loop gets there.

        Args:
            start_step: The first one; None for whichever begins next, where no other rank has to agree.
            steps: How many; 0 for as many as the options say.

        Raises:
            ValueError: No capture has so many.
        """
        self.options = replace(self.options, steps=steps or self.options.steps)
        self._starts_anywhere = start_step is None
        self.start_step = start_step or 0
        self._forget_deadline()
        if self.ended.is_set():
            return
        if start_step is not None and self._loop.train_steps >= start_step:
            self.fail(f"step {start_step} was already under way", retry=True)
            return
        self.stage = CaptureStage.ARMED
        self._replay.watch(self)

    def cancel(self, reason: str) -> None:
        """Give up: at once when not yet running, else at the next step edge."""
        self._cancel_reason = reason
        if self.stage in (CaptureStage.PREPARING, CaptureStage.READY, CaptureStage.ARMED):
            self.fail(reason)

    # On the training thread.

    def train_edge(self, next_index: int) -> None:
        """Start, go on or stop."""
        if self._trace is None:
            if self.outcome is not None:
                # It was given up in the moment that it was armed.
                self._replay.unwatch(self)
                return
            if self._starts_anywhere:
                self.start_step = next_index
            if next_index == self.start_step and not self._cancel_reason:
                self._start(next_index)
            elif next_index >= self.start_step:
                self._give_up(self._cancel_reason or f"step {self.start_step} was missed", retry=True)
            return
        self.steps_made = next_index - self.start_step
        if self._trace.lost:
            self._give_up(str(tracer.LostTraceError()))
            return
        self._annotations.close()
        if self._cancel_reason:
            self._give_up(self._cancel_reason)
        elif next_index == self.start_step + self.options.steps:
            self._stop()
        else:
            self._annotate(next_index)

    def validate_edge(self) -> None:
        """Bear with a short validation in between; a long one would fill the memory."""
        if self._trace is None:
            return
        self._foreign_steps += 1
        if self._cancel_reason:
            self._give_up(self._cancel_reason)
        elif self._foreign_steps > max(_FOREIGN_STEPS_ALLOWED, 4 * self.options.steps):
            self._give_up("a validation began among the chosen steps", retry=True)

    def loop_ended(self) -> None:
        """The loop is over: no more edges will come."""
        if self._trace is not None:
            done = self._loop.train_steps - self.start_step
            self._give_up(f"training ended after {done} of {self.options.steps} steps")
        elif self.outcome is None and not self._ordered:
            self.fail("training ended before the chosen steps")

    def _start(self, index: int) -> None:
        reason = self._unusable()
        if reason:
            self._give_up(reason)
            return
        trace: tracer.Tracer | None = None
        try:
            trace = self._make_tracer()
            trace.start()
        except BaseException as error:  # kineto may refuse for reasons of its own
            is_scripts = is_from_script(error)
            # Torch's profiler may have started before a signal handler of the script raised.
            self._trace = trace if is_scripts else None
            self._give_up(f"torch's profiler did not start: {error}")
            if is_scripts:
                raise
            return
        self._trace = trace
        self.stage = CaptureStage.RUNNING
        self._annotate(index)

    def _unusable(self) -> str:
        return memory_snapshot.unusable() if self.options.kind == MEMORY else tracer.unusable()

    def _make_tracer(self) -> tracer.Tracer:
        options = self.options
        if options.kind == MEMORY:
            return memory_snapshot.MemoryTracer(options.with_stack)
        return tracer.KinetoTracer(
            tracer.Recorded(
                record_shapes=options.record_shapes,
                with_stack=options.with_stack,
                profile_memory=options.profile_memory,
                with_flops=options.with_flops,
                with_modules=options.with_modules,
            ),
            self._unrecorded_step_ns,
            self._own_facts,
        )

    def _stop(self) -> None:
        trace = self._trace
        assert trace is not None
        self._trace = None
        self._replay.follower = None
        self._replay.unwatch(self)
        self.stage = CaptureStage.EXPORTING
        try:
            trace.stop()
        except BaseException as error:
            reason = f"torch's profiler did not stop: {error}"
            if is_from_script(error):
                self._order(partial(self._clear_up, trace, reason, True))
                raise
            self._order(partial(self.fail, reason))
            return
        self._order(partial(self._export, trace))

    def _give_up(self, reason: str, *, retry: bool = False) -> None:
        trace, self._trace = self._trace, None
        self._replay.follower = None
        self._replay.unwatch(self)
        try:
            if trace is not None and trace.lost:
                self._annotations.abandon()
            else:
                self._annotations.close()
            if trace is not None:
                trace.stop()
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

    def _annotate(self, index: int) -> None:
        if self.options.kind == TRACE:
            self._annotations.open_step(index)
            self._replay.follower = self._annotate_phases

    def _annotate_phases(self) -> None:
        # A profiler of the script's that has taken over is to see none of ours.
        if self._trace is None or self._trace.lost:
            return
        try:
            self._annotations.follow(self._replay.recorder.open_phases())
        except BaseException as error:  # a hook of the script's is under way
            self._replay.follower = None
            if is_from_script(error):
                raise
            log.debug("the phases of a capture are no longer annotated: %s", error)

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

    def _export(self, trace: tracer.Tracer) -> None:
        try:
            with CaptureFolder.opened(self.directory, self._owners) as folder:
                # torch picks the format by the name's end, so the part needs the final one too.
                part = folder.new_name(self.file)
                trace.export(folder.path_of(part))
                with folder.open(part) as file:
                    reason = self._unkept(file)
                    if reason:
                        self.fail(reason)
                        return
                    size, digest = _measure(file)
                if self.outcome is not None:
                    # Given up meanwhile: the process is ending.
                    folder.remove(part)
                    return
                folder.rename(part, self.file)
                folder.remove_hidden(self._stem)
        except tracer.LostTraceError as error:
            self.fail(str(error))
            return
        except Exception as error:  # noqa: BLE001 - a full disk, a directory taken away
            # Not the path that torch was given: it means something in this process only.
            reason = _BELOW_DESCRIPTOR.sub(f"{self.directory}/", str(error))
            self.fail(f"cannot write the trace: {reason}")
            return
        self._end(
            CaptureOutcome(ok=True, start_step=self.start_step, file=self.file, bytes=size, sha256=digest)
        )

    def _unkept(self, file: BinaryIO) -> str:
        """Return why what was written must not be kept, or ''."""
        size = os.fstat(file.fileno()).st_size
        if self._cancel_reason:
            return self._cancel_reason
        if self._max_bytes and size > self._max_bytes:
            return (
                f"the {self.options.kind} has {size:,} bytes, {self._max_bytes:,} are allowed;"
                " capture fewer steps or raise --captures-max-bytes-each"
            )
        if self.options.kind == TRACE and not _is_whole(file):
            # Not every release of Kineto looks whether it could write.
            return f"the trace was cut off after {size:,} bytes; is the disk of {self.directory} full?"
        return ""

    # On any thread.

    @property
    def ending(self) -> bool:
        """Whether it was given up or has its outcome, so that it is over in a moment."""
        return bool(self._cancel_reason) or self.outcome is not None

    @property
    def _stem(self) -> str:
        return f"rank{self._identity.rank}"

    @property
    def _manifest(self) -> str:
        return f"{self._stem}.manifest.json"

    def _remove_leftovers(self) -> None:
        # Else it would be made for that.
        if self.directory.is_dir():
            with contextlib.suppress(OSError), CaptureFolder.opened(self.directory, self._owners) as folder:
                folder.remove_hidden(self._stem)

    def _lapse(self) -> None:
        if self.stage is CaptureStage.READY:
            self.fail("no start step came within the time given; capture again")

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def fail(self, reason: str, *, retry: bool = False) -> None:
        """End without a trace; ``retry`` when another attempt may well succeed."""
        self._replay.unwatch(self)
        self._remove_leftovers()
        self._end(CaptureOutcome(ok=False, reason=reason, retry=retry, start_step=self.start_step))

    def _end(self, outcome: CaptureOutcome) -> None:
        with self._ending:
            if self.outcome is not None:
                return
            self.outcome = outcome
        self._forget_deadline()
        self._orders.put(None)
        self.stage = CaptureStage.COMPLETE if outcome.ok else CaptureStage.FAILED
        try:
            self._write_manifest(outcome)
        except OSError as error:
            log.warning("cannot write the manifest of capture %s: %s", self.capture_id, error)
        try:
            self._on_outcome(self, outcome)
        finally:
            self.ended.set()

    def _write_manifest(self, outcome: CaptureOutcome) -> None:
        identity = self._identity
        torch = sys.modules.get("torch")
        manifest = {
            "schema": "torchperfd.capture.rank/1",
            "capture_id": self.capture_id,
            "run": identity.run,
            "job_name": identity.job_name,
            "world_size": identity.world_size,
            "trigger": self._trigger,
            "rank": identity.rank,
            "node": identity.node,
            "pid": identity.pid,
            "state": "complete" if outcome.ok else "failed",
            "reason": outcome.reason,
            "step_range": [self.start_step, self.start_step + self.options.steps],
            "steps_made": self.steps_made,
            "file": outcome.file,
            "bytes": outcome.bytes,
            "sha256": outcome.sha256,
            "options": asdict(self.options),
            "torchperfd_version": __version__,
            "python_version": identity.python_version,
            "torch_version": str(getattr(torch, "__version__", "")),
        }
        with CaptureFolder.opened(self.directory, self._owners) as folder:
            folder.write(self._manifest, (json.dumps(manifest, indent=2) + "\n").encode())


def _is_whole(file: BinaryIO) -> bool:
    """Return whether a Chrome trace has its end: what Kineto writes last, in all releases."""
    file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
    tail = file.read()
    _, named, rest = tail.partition(b'"traceName"')
    # One brace closes what that stands in; those of values after it come in pairs.
    rest = _STRING.sub(b"", rest).rstrip()
    return bool(named) and rest.endswith(b"}") and rest.count(b"}") == rest.count(b"{") + 1


def _measure(file: BinaryIO) -> tuple[int, str]:
    digest = hashlib.sha256()
    size = 0
    file.seek(0)
    while chunk := file.read(1 << 20):
        digest.update(chunk)
        size += len(chunk)
    return size, digest.hexdigest()
