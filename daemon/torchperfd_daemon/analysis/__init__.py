"""Turns a captured trace into answers: trace file in, one dataclass out.

``load`` reads a Kineto trace into a `Trace`, ``summarise`` turns that into a `Summary`,
and ``render_text`` and ``to_dict`` show one `Summary` to people and to programs.
"""

from torchperfd_daemon.analysis.operators import Operator
from torchperfd_daemon.analysis.report import SCHEMA, render_text, to_dict
from torchperfd_daemon.analysis.steps import Step
from torchperfd_daemon.analysis.summary import Summary, summarise
from torchperfd_daemon.analysis.trace import Trace, load

__all__ = [
    "SCHEMA",
    "Operator",
    "Step",
    "Summary",
    "Trace",
    "load",
    "render_text",
    "summarise",
    "to_dict",
]
