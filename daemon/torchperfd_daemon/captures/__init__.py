"""Captures: the agreement among ranks, and the directory where traces are kept."""

from torchperfd_daemon.captures.analyst import AnalysisCounts as AnalysisCounts
from torchperfd_daemon.captures.analyst import Analyst as Analyst
from torchperfd_daemon.captures.analyst import RankShares as RankShares
from torchperfd_daemon.captures.attempt import Progress as Progress
from torchperfd_daemon.captures.attempt import When as When
from torchperfd_daemon.captures.catalog import Catalog as Catalog
from torchperfd_daemon.captures.coordinator import CaptureCounts as CaptureCounts
from torchperfd_daemon.captures.coordinator import Coordinator as Coordinator
from torchperfd_daemon.captures.destination import Destination as Destination
from torchperfd_daemon.captures.index import Listed as Listed
from torchperfd_daemon.captures.index import Listing as Listing
from torchperfd_daemon.captures.index import Query as Query
from torchperfd_daemon.captures.manifest import CaptureRecord as CaptureRecord
from torchperfd_daemon.captures.manifest import CaptureState as CaptureState
from torchperfd_daemon.captures.manifest import RankFacts as RankFacts
from torchperfd_daemon.captures.manifest import RankTrace as RankTrace
from torchperfd_daemon.captures.manifest import Upload as Upload
from torchperfd_daemon.captures.rank_attempts import Participant as Participant
from torchperfd_daemon.captures.retention import Quota as Quota
from torchperfd_daemon.captures.retention_worker import RetentionCounts as RetentionCounts
from torchperfd_daemon.captures.retention_worker import RetentionWorker as RetentionWorker
from torchperfd_daemon.captures.uploader import UploadCounts as UploadCounts
from torchperfd_daemon.captures.uploader import Uploader as Uploader
