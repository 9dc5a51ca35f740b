"""The state, totals and newest steps of every rank on this node, in fixed memory per rank.

Totals come from the clients' cumulative totals, so a lost batch loses no time; batches feed the recent
history and the step-time histogram.
"""

from torchperfd.model.totals import CudaMemory as CudaMemory
from torchperfd.model.totals import GcTotals as GcTotals
from torchperfd.model.totals import PhaseTotals as PhaseTotals
from torchperfd_daemon.store.history import HISTOGRAM_BOUNDS_S as HISTOGRAM_BOUNDS_S
from torchperfd_daemon.store.history import HISTORY_SECONDS as HISTORY_SECONDS
from torchperfd_daemon.store.history import HISTORY_STEPS as HISTORY_STEPS
from torchperfd_daemon.store.history import Arrival as Arrival
from torchperfd_daemon.store.history import ArrivalHistory as ArrivalHistory
from torchperfd_daemon.store.history import Histogram as Histogram
from torchperfd_daemon.store.history import History as History
from torchperfd_daemon.store.history import SecondColumns as SecondColumns
from torchperfd_daemon.store.history import SecondHistory as SecondHistory
from torchperfd_daemon.store.model import ArrivalColumns as ArrivalColumns
from torchperfd_daemon.store.model import KindTotal as KindTotal
from torchperfd_daemon.store.model import ProcessKey as ProcessKey
from torchperfd_daemon.store.model import RankIdentity as RankIdentity
from torchperfd_daemon.store.model import State as State
from torchperfd_daemon.store.model import StepColumns as StepColumns
from torchperfd_daemon.store.model import Totals as Totals
from torchperfd_daemon.store.store import MIN_PRESENT_STEPS as MIN_PRESENT_STEPS
from torchperfd_daemon.store.store import PRESENT_S as PRESENT_S
from torchperfd_daemon.store.store import Rank as Rank
from torchperfd_daemon.store.store import Store as Store
from torchperfd_daemon.store.store import p50_and_p95 as p50_and_p95
