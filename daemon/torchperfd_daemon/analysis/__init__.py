"""Turns a captured trace into answers: trace file in, one dataclass out.

``load`` reads a Kineto trace into a `Trace` of columns, ``summarise`` turns that into a `Summary`,
and ``summary_document`` and ``to_dict`` show one `Summary` to people and to programs. ``analyse`` does the
first two for several ranks, each in a process of its own. ``compare`` puts two sides beside each other.
"""

from torchperfd_daemon.analysis.across import Across as Across
from torchperfd_daemon.analysis.across import across as across
from torchperfd_daemon.analysis.across import across_document as across_document
from torchperfd_daemon.analysis.across import across_to_dict as across_to_dict
from torchperfd_daemon.analysis.advice import Advice as Advice
from torchperfd_daemon.analysis.advice import advice_document as advice_document
from torchperfd_daemon.analysis.advice import advice_to_dict as advice_to_dict
from torchperfd_daemon.analysis.advice import gather as gather
from torchperfd_daemon.analysis.breakdown import DeviceTime as DeviceTime
from torchperfd_daemon.analysis.collectives import Collectives as Collectives
from torchperfd_daemon.analysis.collectives import Kind as Kind
from torchperfd_daemon.analysis.collectives import collectives as collectives
from torchperfd_daemon.analysis.comparison import Change as Change
from torchperfd_daemon.analysis.comparison import ComparedTable as ComparedTable
from torchperfd_daemon.analysis.comparison import Comparison as Comparison
from torchperfd_daemon.analysis.comparison import compare as compare
from torchperfd_daemon.analysis.comparison_report import COMPARISON_ORDERS as COMPARISON_ORDERS
from torchperfd_daemon.analysis.comparison_report import comparison_document as comparison_document
from torchperfd_daemon.analysis.comparison_report import comparison_to_dict as comparison_to_dict
from torchperfd_daemon.analysis.export import csv_document as csv_document
from torchperfd_daemon.analysis.export import rectangles_for as rectangles_for
from torchperfd_daemon.analysis.export import render_comparison_html as render_comparison_html
from torchperfd_daemon.analysis.export import render_html as render_html
from torchperfd_daemon.analysis.export import to_pandas as to_pandas
from torchperfd_daemon.analysis.host_activity import Cause as Cause
from torchperfd_daemon.analysis.idle import Idle as Idle
from torchperfd_daemon.analysis.idle import IdleCause as IdleCause
from torchperfd_daemon.analysis.idle import IdlePlace as IdlePlace
from torchperfd_daemon.analysis.idle import idle as idle
from torchperfd_daemon.analysis.loading import load as load
from torchperfd_daemon.analysis.operator_sums import Operator as Operator
from torchperfd_daemon.analysis.operators import GROUPS as GROUPS
from torchperfd_daemon.analysis.operators import GroupBy as GroupBy
from torchperfd_daemon.analysis.operators import operators as operators
from torchperfd_daemon.analysis.ranks import Answer as Answer
from torchperfd_daemon.analysis.ranks import Request as Request
from torchperfd_daemon.analysis.ranks import analyse as analyse
from torchperfd_daemon.analysis.report import SCHEMA as SCHEMA
from torchperfd_daemon.analysis.report import SORT_WORDS as SORT_WORDS
from torchperfd_daemon.analysis.report import summary_document as summary_document
from torchperfd_daemon.analysis.report import to_dict as to_dict
from torchperfd_daemon.analysis.steps import Step as Step
from torchperfd_daemon.analysis.steps import phases as phases
from torchperfd_daemon.analysis.steps import steps as steps
from torchperfd_daemon.analysis.summary import Quality as Quality
from torchperfd_daemon.analysis.summary import Summary as Summary
from torchperfd_daemon.analysis.summary import quality_lines as quality_lines
from torchperfd_daemon.analysis.summary import summarise as summarise
from torchperfd_daemon.analysis.trace import Trace as Trace
from torchperfd_daemon.analysis.trace_files import RankFile as RankFile
from torchperfd_daemon.analysis.trace_files import rank_files as rank_files
