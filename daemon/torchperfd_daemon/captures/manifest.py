"""The manifest of a capture: what was asked, what came of it, rank by rank."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import msgspec

SCHEMA: Final = "torchperfd.capture/1"
FILE_NAME: Final = "manifest.json"


class CaptureState(Enum):
    """How far a capture, or one rank of it, is."""

    PREPARING = "preparing"
    ARMED = "armed"
    COMPLETE = "complete"
    PARTIAL = "partial"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self not in (CaptureState.PREPARING, CaptureState.ARMED)


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What torch.profiler shall record; see the message of the same name."""

    steps: int = 5
    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False


@dataclass(slots=True)
class RankTrace:
    """One rank's part of a capture."""

    rank: int
    state: CaptureState = CaptureState.PREPARING
    reason: str = ""
    file: str = ""
    bytes: int = 0
    sha256: str = ""


@dataclass(slots=True)
class CaptureRecord:
    """A whole capture. ``step_range`` is [first step, first step after it), None before it is agreed."""

    capture_id: str
    run: str
    trigger: str
    requested_at: float
    state: CaptureState = CaptureState.PREPARING
    reason: str = ""
    step_range: tuple[int, int] | None = None
    options: CaptureOptions = field(default_factory=CaptureOptions)
    ranks: list[RankTrace] = field(default_factory=list)
    schema: str = SCHEMA

    def encode(self) -> bytes:
        """Return the JSON document."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def decode(document: bytes) -> CaptureRecord:
    """Read a manifest.

    Raises:
        msgspec.MsgspecError: It is not one.
    """
    return msgspec.json.decode(document, type=CaptureRecord)
