"""The capture driver: torch's profiler and our annotations, switched on and off at step edges.

torch's profiler records nothing when it is started from another thread, and may crash when two run at
once. So everything here runs on the training thread. What the script raises there, in a signal handler,
passes through; everything else becomes a reason.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torchperfd.captures import memory_snapshot, tracer
from torchperfd.captures.annotations import Annotations
from torchperfd.captures.options import MEMORY, TRACE, CaptureOptions
from torchperfd.safety.interrupts import is_from_script
from torchperfd.safety.logs import log
from torchperfd.steps.replay import Replay


class CaptureDriver:
    """The profiler of one capture.

    Args:
        replay: Reads the ring buffer of the loop whose steps are captured.
        phase_name: Returns the name of a phase's slot.

    Attributes:
        unrecorded_step_ns: Duration of a step before the capture, for readers of the trace; 0 if unknown.
        own_facts: What else the client knows of steps that nothing records.
    """

    def __init__(self, replay: Replay, phase_name: Callable[[int], str]) -> None:
        self.unrecorded_step_ns = 0
        self.own_facts: Mapping[str, Any] = {}
        self._replay = replay
        self._annotations = Annotations(phase_name)
        self._kind = TRACE
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
        if self._kind == TRACE:
            self._annotations.open_step(index)
            self._replay.after_read = self._annotate_phases

    def close_annotations(self) -> None:
        """End the annotations of the step that has ended."""
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
            self.unrecorded_step_ns,
            self.own_facts,
        )

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
    return memory_snapshot.unusable() if options.kind == MEMORY else tracer.unusable()
