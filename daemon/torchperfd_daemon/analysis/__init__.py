"""Turns a captured trace into answers: trace file in, one dataclass out.

``load`` reads a Kineto trace into a `Trace` of columns, ``summarise`` turns that into a `Summary`,
and ``render_text`` and ``to_dict`` show one `Summary` to people and to programs. ``analyse`` does the
first two for several ranks, each in a process of its own.
"""

from torchperfd_daemon.analysis.breakdown import Breakdown, DeviceTime, Kernel
from torchperfd_daemon.analysis.operators import GROUPS, GroupBy, Operator, operators
from torchperfd_daemon.analysis.ranks import RankFile, Request, analyse, rank_files
from torchperfd_daemon.analysis.report import SCHEMA, SORT_WORDS, render_text, to_dict
from torchperfd_daemon.analysis.steps import Step, steps
from torchperfd_daemon.analysis.summary import Summary, summarise
from torchperfd_daemon.analysis.trace import Trace, load

__all__ = [
    "GROUPS",
    "SCHEMA",
    "SORT_WORDS",
    "Breakdown",
    "DeviceTime",
    "GroupBy",
    "Kernel",
    "Operator",
    "RankFile",
    "Request",
    "Step",
    "Summary",
    "Trace",
    "analyse",
    "load",
    "operators",
    "rank_files",
    "render_text",
    "steps",
    "summarise",
    "to_dict",
]
