"""Captures: the agreement among ranks, and the directory where traces are kept."""

from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.coordinator import CaptureCounts, Coordinator, Participant, Progress
from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState, RankTrace

__all__ = [
    "CaptureCounts",
    "CaptureRecord",
    "CaptureState",
    "Catalog",
    "Coordinator",
    "Participant",
    "Progress",
    "RankTrace",
]
