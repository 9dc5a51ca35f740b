"""Goodput: what every rank-second of a run went to, across restarts."""

from torchperfd_daemon.goodput.store import FOLDER as FOLDER
from torchperfd_daemon.goodput.store import GoodputStore as GoodputStore
from torchperfd_daemon.goodput.totals import Bucket as Bucket
from torchperfd_daemon.goodput.totals import Claims as Claims
from torchperfd_daemon.goodput.totals import GoodputTotals as GoodputTotals
from torchperfd_daemon.goodput.totals import RankGoodput as RankGoodput
from torchperfd_daemon.goodput.totals import RunGoodput as RunGoodput
from torchperfd_daemon.goodput.totals import by_run as by_run
from torchperfd_daemon.goodput.tracker import GoodputTracker as GoodputTracker
