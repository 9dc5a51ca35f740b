"""The manifest of a capture: what was asked, what came of it, rank by rank."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Final

import msgspec

SCHEMA: Final = "torchperfd.capture/1"
FILE_NAME: Final = "manifest.json"
LATEST: Final = 1e11
"""Unix time beyond which a date is taken for nonsense: calendars overflow."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Time = Annotated[float, msgspec.Meta(ge=0, le=LATEST)]


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

    steps: _Count = 5
    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False


@dataclass(slots=True)
class RankTrace:
    """One rank's part of a capture."""

    rank: _Count
    state: CaptureState = CaptureState.PREPARING
    reason: str = ""
    file: str = ""
    bytes: _Count = 0
    sha256: str = ""


@dataclass(slots=True)
class CaptureRecord:
    """A whole capture. ``step_range`` is [first step, first step after it), None before it is agreed."""

    capture_id: str
    run: str
    trigger: str
    requested_at: _Time
    state: CaptureState = CaptureState.PREPARING
    reason: str = ""
    step_range: tuple[_Count, _Count] | None = None
    options: CaptureOptions = field(default_factory=CaptureOptions)
    ranks: list[RankTrace] = field(default_factory=list)
    schema: str = SCHEMA

    def encode(self) -> bytes:
        """Return the JSON document."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


@dataclass(frozen=True, slots=True)
class RankManifest:
    """What a rank writes beside its trace, as far as it is read here."""

    rank: _Count
    state: CaptureState
    reason: str
    file: str
    bytes: _Count
    sha256: str
    step_range: tuple[_Count, _Count]
    options: CaptureOptions
    run: str = ""

    def trace(self) -> RankTrace:
        """Return the rank's part of the capture."""
        return RankTrace(self.rank, self.state, self.reason, self.file, self.bytes, self.sha256)


def decode(document: bytes) -> CaptureRecord:
    """Read a manifest.

    Raises:
        msgspec.MsgspecError: It is not one.
    """
    return msgspec.json.decode(document, type=CaptureRecord)


def decode_rank(document: bytes) -> RankManifest:
    """Read what a rank wrote.

    Raises:
        msgspec.MsgspecError: It is no such manifest.
    """
    return msgspec.json.decode(document, type=RankManifest)


def overall_state(ranks: list[RankTrace]) -> CaptureState:
    """Return what a capture has come to, once all its ranks have ended."""
    complete = sum(rank.state is CaptureState.COMPLETE for rank in ranks)
    if complete == len(ranks) and ranks:
        return CaptureState.COMPLETE
    return CaptureState.PARTIAL if complete else CaptureState.FAILED


def first_reason(ranks: list[RankTrace]) -> str:
    """Return why a capture is not complete: the first failing rank's words, and how many failed."""
    failed = [rank for rank in ranks if rank.state is CaptureState.FAILED]
    if not failed:
        return ""
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    return f"rank {failed[0].rank}: {failed[0].reason}{more}"
