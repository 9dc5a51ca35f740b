"""Annotations: our steps and phases, written into the trace of a capture.

While a capture records, the training thread reads the ring buffer along, so that the recorder's open phases
are those of this moment. After each event they are compared with the annotations that are open, and
what differs is closed or opened: the trace shows the phases that the recorder times.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final


class Annotations:
    """The open annotations of one thread: a step, and the phases within it, outermost first.

    Args:
        name: Returns the name of a phase's slot.
    """

    def __init__(self, name: Callable[[int], str]) -> None:
        self._name = name
        self._step: Any = None
        self._phases: list[tuple[int, Any]] = []

    def open_step(self, index: int) -> None:
        """Begin a step."""
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
    """Open an annotation of torch's profiler, and return it."""
    from torch.autograd.profiler import record_function

    annotation: Any = record_function(name)
    annotation.__enter__()
    return annotation
