"""Merges the stacks of a run's ranks and finds the ranks that differ. Pure, without I/O."""

from torchperfd_daemon.stacks.dump import parse_dump
from torchperfd_daemon.stacks.merge import Group, Merged, ThreadGroup, merge
from torchperfd_daemon.stacks.model import Frame, GroupProgress, Outcome, RankStacks, Thread, tidy
from torchperfd_daemon.stacks.py_spy import parse_py_spy

__all__ = [
    "Frame",
    "Group",
    "GroupProgress",
    "Merged",
    "Outcome",
    "RankStacks",
    "Thread",
    "ThreadGroup",
    "merge",
    "parse_dump",
    "parse_py_spy",
    "tidy",
]
