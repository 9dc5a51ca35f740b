"""Goodput: what every rank-second of a run went to, across restarts."""

from torchperfd_daemon.goodput.store import FOLDER, GoodputStore
from torchperfd_daemon.goodput.summary import RankGoodput, RunGoodput, by_run
from torchperfd_daemon.goodput.totals import Bucket, Claims, GoodputTotals
from torchperfd_daemon.goodput.tracker import GoodputTracker

__all__ = [
    "FOLDER",
    "Bucket",
    "Claims",
    "GoodputStore",
    "GoodputTotals",
    "GoodputTracker",
    "RankGoodput",
    "RunGoodput",
    "by_run",
]
