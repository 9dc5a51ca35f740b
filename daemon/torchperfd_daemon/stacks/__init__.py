"""Where the threads of a run's ranks are: pure functions from what ranks told to who stands apart."""

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
