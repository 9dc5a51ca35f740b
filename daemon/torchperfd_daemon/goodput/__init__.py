"""Goodput: what every rank-second of a run went to, across restarts."""

from torchperfd_daemon.goodput.accountant import Accountant
from torchperfd_daemon.goodput.book import FOLDER, Book
from torchperfd_daemon.goodput.ledger import Bucket, Claims, RankLedger
from torchperfd_daemon.goodput.summary import RankGoodput, RunGoodput, by_run

__all__ = [
    "FOLDER",
    "Accountant",
    "Book",
    "Bucket",
    "Claims",
    "RankGoodput",
    "RankLedger",
    "RunGoodput",
    "by_run",
]
