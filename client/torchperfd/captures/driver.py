"""The capture driver: torch's profiler, memory snapshots and our annotations, switched at step edges.

torch's profiler records nothing when it is started from another thread, and may crash when two run at once.
So everything here runs on the training thread. What the script raises there, in a signal handler, passes
through; everything else becomes a reason.

While a trace records, the training thread reads the ring buffer along. After each event the open phases of
the recorder are compared with the open annotations, and what differs is closed or opened. Of memory, torch
records the history and returns the snapshot; the file is the pickle that its ``memory_viz`` page reads.
"""

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torchperfd.captures import tracer
from torchperfd.captures.state import CaptureOptions
from torchperfd.hooks import cuda
from torchperfd.model.capture_options import CaptureKind
from torchperfd.safety.interrupts import is_from_script
from torchperfd.safety.logs import log
from torchperfd.steps.replay import Replay


class Annotations:
    """The open annotations of one thread: a step, and the phases within it, outermost first."""

    def __init__(self, name: Callable[[int], str]) -> None:
        self._name = name
        self._step: Any = None
        self._phases: list[tuple[int, Any]] = []

    def open_step(self, index: int) -> None:
        # The name that every trace reader knows as a step's.
        self._step = open_annotation(f"ProfilerStep#{index}")

    def follow(self, phases: Sequence[int]) -> None:
        """Have exactly these phases open, by slot, outermost first; none outside a step."""
        if self._step is None:
            return
        same = 0
        for (slot, _), wanted in zip(self._phases, phases, strict=False):
            if slot != wanted:
                break
            same += 1
        self._close_beyond(same)
        for slot in phases[same:]:
            self._phases.append((slot, open_annotation(self._name(slot))))

    def close(self) -> None:
        """End the phases, innermost first, and the step."""
        self._close_beyond(0)
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

    def abandon(self) -> None:
        """Never close the open annotations: the profiler under which they began is gone.

        Where another one is on by then, torch would write an annotation's end into memory that the first had.
        """
        _abandoned.extend([self._step, *(annotation for _, annotation in self._phases)])
        self._step, self._phases = None, []

    def _close_beyond(self, depth: int) -> None:
        while len(self._phases) > depth:
            _, annotation = self._phases.pop()
            annotation.__exit__(None, None, None)


_abandoned: Final[list[Any]] = []
"""Kept alive, because garbage collection would close them; a few for each lost capture."""


def open_annotation(name: str) -> Any:
    from torch.autograd.profiler import record_function

    annotation: Any = record_function(name)
    annotation.__enter__()
    return annotation


MAX_MEMORY_EVENTS: Final = 200_000
"""Allocations and frees that the history holds; of more, torch keeps the newest.

Each is an entry of a Python dictionary in the snapshot, about 1 kB with its frames.
"""

VIEWERS_PROTOCOL: Final = 4
"""The newest pickle protocol that torch's viewer reads. Python 3.14 writes 5 by default."""


def memory_unusable() -> str:
    """Return why no snapshot can be made now, '' when one can."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "the process has not imported torch yet"
    # Not is_available(): asking the driver for the first time may cost this process its forked workers.
    if not torch.cuda.is_initialized():
        return "no CUDA in this process"
    if cuda.is_memory_recorded():
        return "the script records the history of CUDA memory itself; wait until it has stopped"
    return ""


class MemoryTracer:
    """The history of the CUDA allocator between ``start`` and ``stop``.

    Args:
        with_stack: Record the Python stacks of frees as well, not only those of allocations.
    """

    def __init__(self, with_stack: bool) -> None:
        self._context: Final = "all" if with_stack else "alloc"
        self._snapshot: Any = None

    @property
    def lost(self) -> bool:
        """Never: torch's profilers do not meddle with it."""
        return False

    def start(self) -> None:
        """Begin to record; about 2 us for each allocation from here on."""
        cuda.record_memory(self._context, MAX_MEMORY_EVENTS)

    def stop(self) -> None:
        """Take the snapshot, and end recording: that forgets the history, so it comes second."""
        try:
            self.take()
        finally:
            cuda.stop_memory_recording()

    def take(self) -> None:
        self._snapshot = cuda.snapshot_memory()

    def export(self, path: Path) -> None:
        """Write the snapshot, once, and forget it.

        Raises:
            OSError: It cannot be written.
        """
        snapshot, self._snapshot = self._snapshot, None
        with path.open("wb") as file:
            pickle.dump(snapshot, file, protocol=VIEWERS_PROTOCOL)

    def discard(self) -> None:
        self._snapshot = None


class CaptureDriver:
    """The profiler of one capture.

    Attributes:
        unrecorded_step_ns: Duration of a step before the capture, for readers of the trace; 0 if unknown.
        own_facts: What else the client knows of steps that nothing records.
    """

    def __init__(self, replay: Replay, phase_name: Callable[[int], str]) -> None:
        self.unrecorded_step_ns = 0
        self.own_facts: Mapping[str, Any] = {}
        self._replay = replay
        self._annotations = Annotations(phase_name)
        self._kind: str = CaptureKind.TRACE
        self._trace: tracer.Tracer | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the script's own profiler has taken over."""
        return self._trace is not None and self._trace.lost

    def start(self, options: CaptureOptions) -> str:
        """Record from now on; return why that cannot be, or ''."""
        self._kind = options.kind
        reason = unusable(options)
        if reason:
            return reason
        trace: tracer.Tracer | None = None
        try:
            trace = self._make_tracer(options)
            trace.start()
        except BaseException as error:  # kineto may refuse for reasons of its own
            if is_from_script(error):
                # Torch's profiler may have started before a signal handler of the script raised.
                self._trace = trace
                raise
            return f"torch's profiler did not start: {error}"
        self._trace = trace
        return ""

    def annotate(self, index: int) -> None:
        """Annotate the step that begins, and its phases as they come."""
        if self._kind == CaptureKind.TRACE:
            self._annotations.open_step(index)
            self._replay.after_read = self._annotate_phases

    def close_annotations(self) -> None:
        self._annotations.close()

    def release(self) -> tracer.Tracer | None:
        """Return the trace unchanged and stop annotating; None if nothing is being recorded."""
        trace, self._trace = self._trace, None
        self._replay.after_read = None
        return trace

    def end(self, trace: tracer.Tracer | None) -> None:
        """Stop a trace that was released in the middle of a step, and end its annotations.

        Raises:
            BaseException: What torch raises, or the script in a signal handler.
        """
        if trace is not None and trace.lost:
            self._annotations.abandon()
        else:
            self._annotations.close()
        if trace is not None:
            trace.stop()

    def _make_tracer(self, options: CaptureOptions) -> tracer.Tracer:
        if options.kind == CaptureKind.MEMORY:
            return MemoryTracer(options.with_stack)
        return tracer.KinetoTracer(options, self.unrecorded_step_ns, self.own_facts)

    def _annotate_phases(self) -> None:
        # A profiler of the script's that has taken over is to see none of ours.
        if self._trace is None or self._trace.lost:
            return
        try:
            self._annotations.follow(self._replay.recorder.open_phases())
        except BaseException as error:  # a hook of the script's is under way
            self._replay.after_read = None
            if is_from_script(error):
                raise
            log.debug("the phases of a capture are no longer annotated: %s", error)


def unusable(options: CaptureOptions) -> str:
    """Return why nothing can be recorded on this thread now, '' when it can."""
    return memory_unusable() if options.kind == CaptureKind.MEMORY else tracer.unusable()
