"""Counts of captures by outcome."""

from dataclasses import dataclass, field

from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState


@dataclass(slots=True)
class CaptureCounts:
    """Counts of captures since the daemon started; read by the metrics page."""

    requests: dict[tuple[str, str], int] = field(default_factory=dict)
    bytes: int = 0
    active: int = 0
    last_success_unix_seconds: float = 0.0

    def count(self, record: CaptureRecord, now: float) -> None:
        """Add a capture that has ended."""
        key = (record.trigger, record.state.value)
        self.requests[key] = self.requests.get(key, 0) + 1
        self.bytes += sum(rank.bytes for rank in record.ranks)
        if record.state is CaptureState.COMPLETE:
            self.last_success_unix_seconds = now
