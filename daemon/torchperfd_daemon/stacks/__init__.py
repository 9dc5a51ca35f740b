"""Merges the stacks of a run's ranks and finds the ranks that differ. Pure, without I/O."""

from torchperfd.model.process import GroupProgress as GroupProgress
from torchperfd_daemon.stacks.activity import Loading as Loading
from torchperfd_daemon.stacks.activity import Part as Part
from torchperfd_daemon.stacks.activity import ScriptLine as ScriptLine
from torchperfd_daemon.stacks.activity import Stage as Stage
from torchperfd_daemon.stacks.activity import host_part as host_part
from torchperfd_daemon.stacks.activity import loading as loading
from torchperfd_daemon.stacks.activity import running_line as running_line
from torchperfd_daemon.stacks.activity import script_lines as script_lines
from torchperfd_daemon.stacks.merge import Group as Group
from torchperfd_daemon.stacks.merge import Merged as Merged
from torchperfd_daemon.stacks.merge import ThreadGroup as ThreadGroup
from torchperfd_daemon.stacks.merge import merge as merge
from torchperfd_daemon.stacks.model import Frame as Frame
from torchperfd_daemon.stacks.model import Outcome as Outcome
from torchperfd_daemon.stacks.model import RankStacks as RankStacks
from torchperfd_daemon.stacks.model import Thread as Thread
from torchperfd_daemon.stacks.model import numbered as numbered
from torchperfd_daemon.stacks.model import parse_dump as parse_dump
from torchperfd_daemon.stacks.model import parse_py_spy as parse_py_spy
from torchperfd_daemon.stacks.model import tidy as tidy
