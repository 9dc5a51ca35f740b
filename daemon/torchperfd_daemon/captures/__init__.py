"""Captures: the agreement among ranks, and the directory where traces are kept."""

from torchperfd_daemon.captures.analyst import AnalysisCounts, Analyst, RankShares
from torchperfd_daemon.captures.attempt import Progress
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.captures.counts import CaptureCounts
from torchperfd_daemon.captures.destination import Destination
from torchperfd_daemon.captures.index import Listed, Listing, Query
from torchperfd_daemon.captures.manifest import CaptureKind, CaptureRecord, CaptureState, RankFacts, RankTrace
from torchperfd_daemon.captures.rank_attempts import Participant
from torchperfd_daemon.captures.receipt import Upload
from torchperfd_daemon.captures.retention import Quota
from torchperfd_daemon.captures.retention_worker import RetentionCounts, RetentionWorker
from torchperfd_daemon.captures.schedule import When
from torchperfd_daemon.captures.uploader import UploadCounts, Uploader

__all__ = [
    "AnalysisCounts",
    "Analyst",
    "CaptureCounts",
    "CaptureKind",
    "CaptureRecord",
    "CaptureState",
    "Catalog",
    "Coordinator",
    "Destination",
    "Listed",
    "Listing",
    "Participant",
    "Progress",
    "Query",
    "Quota",
    "RankFacts",
    "RankShares",
    "RankTrace",
    "RetentionCounts",
    "RetentionWorker",
    "Upload",
    "UploadCounts",
    "Uploader",
    "When",
]
