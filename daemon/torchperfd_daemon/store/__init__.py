"""The state, totals and newest steps of every rank on this node, in fixed memory per rank.

Totals come from the clients' cumulative totals, so a lost batch loses no time; batches feed the recent
history and the step-time histogram.
"""

from torchperfd_daemon.store.history import (
    HISTOGRAM_BOUNDS_S,
    HISTORY_STEPS,
    Arrival,
    ArrivalHistory,
    Histogram,
    History,
)
from torchperfd_daemon.store.model import (
    ArrivalColumns,
    CudaMemory,
    GcTotal,
    KindTotal,
    PhaseTotal,
    ProcessKey,
    RankIdentity,
    State,
    StepColumns,
    Totals,
)
from torchperfd_daemon.store.rank import Rank
from torchperfd_daemon.store.store import Store

__all__ = [
    "HISTOGRAM_BOUNDS_S",
    "HISTORY_STEPS",
    "Arrival",
    "ArrivalColumns",
    "ArrivalHistory",
    "CudaMemory",
    "GcTotal",
    "Histogram",
    "History",
    "KindTotal",
    "PhaseTotal",
    "ProcessKey",
    "Rank",
    "RankIdentity",
    "State",
    "StepColumns",
    "Store",
    "Totals",
]
