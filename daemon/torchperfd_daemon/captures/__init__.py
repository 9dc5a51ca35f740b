"""Captures: the agreement among ranks, and the directory where traces are kept."""

from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.coordinator import CaptureCounts, Coordinator, Participant, Progress
from torchperfd_daemon.captures.index import Listed, Listing, Query
from torchperfd_daemon.captures.keeper import Keeper, KeptCounts
from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState, RankTrace
from torchperfd_daemon.captures.retention import Quota

__all__ = [
    "CaptureCounts",
    "CaptureRecord",
    "CaptureState",
    "Catalog",
    "Coordinator",
    "Keeper",
    "KeptCounts",
    "Listed",
    "Listing",
    "Participant",
    "Progress",
    "Query",
    "Quota",
    "RankTrace",
]
