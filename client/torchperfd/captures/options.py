"""Capture options: what a capture records, and for how many steps."""

from dataclasses import dataclass
from typing import Final

TRACE: Final = "trace"
MEMORY: Final = "memory"
KINDS: Final = (TRACE, MEMORY)
"""What a capture can be."""

_MAX_STEPS: Final = 1000


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What shall be captured, and for how many training steps.

    Attributes:
        steps: How many training steps.
        kind: ``trace``, by torch.profiler, or ``memory``, a snapshot of CUDA memory and its history.
        automatic: The run's own capture, not its user's, whose captures wait for its end instead of being
            refused.
    """

    steps: int = 5
    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False
    kind: str = TRACE
    with_flops: bool = False
    with_modules: bool = False
    automatic: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= _MAX_STEPS:
            raise ValueError(f"steps must be 1 to {_MAX_STEPS}, not {self.steps}")
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {self.kind!r}")
