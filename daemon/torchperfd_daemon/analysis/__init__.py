"""Turns a captured trace into answers: trace file in, one dataclass out.

``load`` reads a Kineto trace into a `Trace` of columns, ``summarise`` turns that into a `Summary`,
and ``render_text`` and ``to_dict`` show one `Summary` to people and to programs. ``analyse`` does the
first two for several ranks, each in a process of its own. ``compare`` puts two sides beside each other.
"""

from torchperfd_daemon.analysis.across import Across, KindWait, RankWait, across
from torchperfd_daemon.analysis.across_report import across_to_dict, render_across
from torchperfd_daemon.analysis.advice import Advice, advice_to_dict, gather, render_advice
from torchperfd_daemon.analysis.breakdown import Breakdown, DeviceTime, Kernel
from torchperfd_daemon.analysis.collectives import Collectives, Kind, collectives
from torchperfd_daemon.analysis.compare import compare
from torchperfd_daemon.analysis.compare_report import (
    COMPARISON_ORDERS,
    COMPARISON_SCHEMA,
    comparison_to_dict,
    comparison_to_markdown,
    render_comparison,
)
from torchperfd_daemon.analysis.comparison import Change, ComparedTable, Comparison, Side
from torchperfd_daemon.analysis.export import to_csv, to_markdown, to_pandas
from torchperfd_daemon.analysis.html import rectangles_for, render_html
from torchperfd_daemon.analysis.idle import CAUSES, Cause, Idle, IdleCause, IdlePlace, idle
from torchperfd_daemon.analysis.loading import load
from torchperfd_daemon.analysis.operator_rows import Operator
from torchperfd_daemon.analysis.operators import GROUPS, GroupBy, operators
from torchperfd_daemon.analysis.phases import phases
from torchperfd_daemon.analysis.quality import Quality, quality_lines
from torchperfd_daemon.analysis.rank_files import RankFile, rank_files
from torchperfd_daemon.analysis.ranks import Request, analyse
from torchperfd_daemon.analysis.report import SCHEMA, SORT_WORDS, render_text, to_dict
from torchperfd_daemon.analysis.samples import MemorySteps, Samples
from torchperfd_daemon.analysis.steps import Step, steps
from torchperfd_daemon.analysis.summary import Summary, SummaryTable, summarise
from torchperfd_daemon.analysis.trace import Trace

__all__ = [
    "CAUSES",
    "COMPARISON_ORDERS",
    "COMPARISON_SCHEMA",
    "GROUPS",
    "SCHEMA",
    "SORT_WORDS",
    "Across",
    "Advice",
    "Breakdown",
    "Cause",
    "Change",
    "Collectives",
    "ComparedTable",
    "Comparison",
    "DeviceTime",
    "GroupBy",
    "Idle",
    "IdleCause",
    "IdlePlace",
    "Kernel",
    "Kind",
    "KindWait",
    "MemorySteps",
    "Operator",
    "Quality",
    "RankFile",
    "RankWait",
    "Request",
    "Samples",
    "Side",
    "Step",
    "Summary",
    "SummaryTable",
    "Trace",
    "across",
    "across_to_dict",
    "advice_to_dict",
    "analyse",
    "collectives",
    "compare",
    "comparison_to_dict",
    "comparison_to_markdown",
    "gather",
    "idle",
    "load",
    "operators",
    "phases",
    "quality_lines",
    "rank_files",
    "rectangles_for",
    "render_across",
    "render_advice",
    "render_comparison",
    "render_html",
    "render_text",
    "steps",
    "summarise",
    "to_csv",
    "to_dict",
    "to_markdown",
    "to_pandas",
]
