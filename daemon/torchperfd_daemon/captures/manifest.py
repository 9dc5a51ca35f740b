"""The manifest of a capture (its request, and its outcome per rank), and the receipt of its upload."""

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Annotated, Any, Final

import msgspec

from torchperfd.model import capture_options
from torchperfd.model.capture_options import CaptureKind
from torchperfd.model.verdict_document import SettledAdvice

SCHEMA: Final = "torchperfd.capture/1"
FILE_NAME: Final = "manifest.json"
LATEST: Final = 1e11
"""Unix time beyond which a date is treated as invalid: calendars overflow."""

_NO_REPORT: Final = "no report from this rank; the daemon ended during the capture"

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Signed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Time = Annotated[float, msgspec.Meta(ge=0, le=LATEST)]


class CaptureState(Enum):
    """How far a capture, or one rank of it, is."""

    PREPARING = "preparing"
    ARMED = "armed"
    COMPLETE = "complete"
    PARTIAL = "partial"
    FAILED = "failed"
    QUEUED = "queued"

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self in (CaptureState.COMPLETE, CaptureState.PARTIAL, CaptureState.FAILED)


@dataclass(frozen=True, slots=True)
class CaptureOptions(capture_options.CaptureOptions):
    """The options of a capture, as far as a manifest may have them."""

    steps: _Count = 5
    kind: CaptureKind = CaptureKind.TRACE


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Which process a rank is, and what runs in it; what is not known is empty or 0.

    Attributes:
        pid: The process, in its own pid namespace.
        clock_offset_ns: Its node's clock minus that of the daemon that conducts; 0 on its own node.
        job_name: What people call this kind of run.
        uid: User of the process, as reported by its node's kernel; None if unknown.
        coordinates: Its place in each dimension of its job, such as ``pp=1 dp=0``.
    """

    node: str = ""
    pid: int = 0
    clock_offset_ns: int = 0
    torch_version: str = ""
    python_version: str = ""
    client_version: str = ""
    job_name: str = ""
    world_size: int = 0
    uid: int | None = None
    coordinates: str = ""


@dataclass(slots=True)
class RankTrace:
    """One rank's part of a capture; the fields from ``node`` on are those of ``RankFacts``.

    ``steps_made`` are the steps of those agreed on that the rank made while its profiler was on.
    ``pause_seconds`` is how long training pauses when the capture ends: estimated, then measured; 0: unknown.
    ``launches`` and ``kernels`` are counts in the trace, of launches of single kernels and of all kernels.
    ``step_change`` is by what part steps after the capture take longer than before; None if not known.
    """

    rank: _Count
    state: CaptureState = CaptureState.PREPARING
    reason: str = ""
    file: str = ""
    bytes: _Count = 0
    sha256: str = ""
    steps_made: _Count = 0
    node: str = ""
    pid: _Count = 0
    clock_offset_ns: _Signed = 0
    torch_version: str = ""
    python_version: str = ""
    client_version: str = ""
    uid: _Count | None = None
    pause_seconds: float = 0.0
    coordinates: str = ""
    step_change: float | None = None
    launches: _Count = 0
    kernels: _Count = 0

    @classmethod
    def of(cls, rank: int, facts: RankFacts) -> "RankTrace":
        """Return the part of a rank that has yet to do anything."""
        return cls(rank, **_shared(facts))


@dataclass(frozen=True, slots=True)
class RankManifest:
    """What a rank writes beside its trace, as far as it is read here.

    ``uid`` is its user, added by a service that has taken the file over; None in the rank's own file.
    """

    rank: _Count
    state: CaptureState
    reason: str
    file: str
    bytes: _Count
    sha256: str
    step_range: tuple[_Count, _Count]
    options: CaptureOptions
    run: str = ""
    trigger: str = "script"
    node: str = ""
    pid: _Count = 0
    job_name: str = ""
    world_size: _Count = 0
    steps_made: _Count = 0
    torch_version: str = ""
    python_version: str = ""
    torchperfd_version: str = ""
    pause_seconds: float = 0.0
    launches: _Count = 0
    kernels: _Count = 0
    uid: _Count | None = None

    def trace(self) -> RankTrace:
        """Return the rank's part of the capture."""
        return RankTrace(**_shared(self), client_version=self.torchperfd_version)


def _shared(own: "RankFacts | RankManifest") -> dict[str, Any]:
    """Return the values of the fields that a rank's trace has by the same name."""
    names = {each.name for each in fields(RankTrace)}
    return {each.name: getattr(own, each.name) for each in fields(own) if each.name in names}


@dataclass(slots=True)
class CaptureRecord:
    """A whole capture.

    Attributes:
        capture_id: Its name, and its folder's.
        trigger: What asked for it: ``command``, ``script``, ``automatic`` or the name of a rule.
        requested_at: Unix seconds, as all times here.
        reason: Why it is not complete; empty when it is.
        step_range: [first step, first step after it); None before it is agreed.
        job_name: What people call this kind of run.
        world_size: Ranks of the whole job, captured or not; 0 when unknown.
        daemon_version: Of the daemon that conducted it; empty when none did.
        ends_by: When it will have ended at the latest, whatever happens; 0 when unknown.
        ended_at: When it ended; 0 before.
        cancelled_by: ``command``, ``script``, or ``caller`` that left; empty when it was not cancelled.
        loader_advice: What the run was advised on its loaders when it ended; None when that was not settled.
    """

    capture_id: str
    run: str
    trigger: str
    requested_at: _Time
    state: CaptureState = CaptureState.PREPARING
    reason: str = ""
    step_range: tuple[_Count, _Count] | None = None
    options: CaptureOptions = field(default_factory=CaptureOptions)
    ranks: list[RankTrace] = field(default_factory=list)
    job_name: str = ""
    world_size: _Count = 0
    daemon_version: str = ""
    ends_by: _Time = 0.0
    ended_at: _Time = 0.0
    cancelled_by: str = ""
    loader_advice: SettledAdvice | None = None
    schema: str = SCHEMA

    @property
    def cancellation(self) -> str:
        """The reason of a cancelled capture."""
        return "cancelled" if self.cancelled_by == "caller" else f"cancelled by {self.cancelled_by}"

    @property
    def users(self) -> set[int]:
        """Users of its ranks' processes, as far as known."""
        return {rank.uid for rank in self.ranks if rank.uid is not None}

    def add_rank_manifests(self, manifests: "list[RankManifest]", now: float) -> None:
        """Update a capture whose daemon died during it, from its ranks' own manifests.

        Args:
            manifests: The ranks' own; each counts for a rank without an outcome.
            now: Unix seconds. A rank without a manifest has failed once the capture must have ended.
        """
        by_rank = {each.rank: each for each in manifests}
        for position, trace in enumerate(self.ranks):
            if trace.state.ended:
                continue
            if trace.rank in by_rank:
                self.ranks[position] = by_rank[trace.rank].trace()
                self.ranks[position].clock_offset_ns = trace.clock_offset_ns
                self.ranks[position].uid = trace.uid
                if self.step_range is None and by_rank[trace.rank].state is CaptureState.COMPLETE:
                    self.step_range = by_rank[trace.rank].step_range
            elif self.ends_by and now > self.ends_by:
                trace.state, trace.reason = CaptureState.FAILED, _NO_REPORT
        if self.ranks and all(trace.state.ended for trace in self.ranks):
            self.state = overall_state(self.ranks)
            self.reason = first_reason(self.ranks)

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def overall_state(ranks: list[RankTrace]) -> CaptureState:
    """Return a capture's state, once all its ranks have ended."""
    complete = sum(rank.state is CaptureState.COMPLETE for rank in ranks)
    if complete == len(ranks) and ranks:
        return CaptureState.COMPLETE
    return CaptureState.PARTIAL if complete else CaptureState.FAILED


def first_reason(ranks: list[RankTrace]) -> str:
    """Return why a capture is not complete: the first failed rank's reason, and how many failed."""
    failed = [rank for rank in ranks if rank.state is CaptureState.FAILED]
    if not failed:
        return ""
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    return f"rank {failed[0].rank}: {failed[0].reason}{more}"


RECEIPT_FILE: Final = ".upload"
RECEIPT_SCHEMA: Final = "torchperfd.upload/1"


class Upload(Enum):
    """How far the upload of a capture is."""

    NONE = "none"
    """There is nothing to upload: it is in progress, it failed, or no daemon wrote its manifest."""
    PENDING = "pending"
    DONE = "done"
    REFUSED = "refused"
    """Its files do not match its manifest; the upload is not retried."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of an upload.

    Attributes:
        upload: ``DONE`` or ``REFUSED``.
        manifest_sha256: The hash of the uploaded manifest; the receipt applies to that manifest only.
        url: Where the capture is, with its id.
        at: Unix seconds.
        reason: Why it was refused.
    """

    upload: Upload
    manifest_sha256: str
    url: str
    at: Annotated[float, msgspec.Meta(ge=0)]
    reason: str = ""
    schema: str = RECEIPT_SCHEMA

    def encode(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"
