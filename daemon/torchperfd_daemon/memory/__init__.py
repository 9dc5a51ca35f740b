"""Turns a snapshot of torch's CUDA allocator into one page: file in, one dataclass out.

``load`` reads the file without executing anything in it, ``summarise`` adds up, and ``page_document`` and
``to_dict`` show one `MemorySummary` to people and to programs.
"""

from torchperfd_daemon.memory.model import Snapshot as Snapshot
from torchperfd_daemon.memory.report import SCHEMA as SCHEMA
from torchperfd_daemon.memory.report import page_document as page_document
from torchperfd_daemon.memory.report import to_dict as to_dict
from torchperfd_daemon.memory.snapshot import SnapshotFile as SnapshotFile
from torchperfd_daemon.memory.snapshot import find_snapshots as find_snapshots
from torchperfd_daemon.memory.snapshot import load as load
from torchperfd_daemon.memory.summary import MAX_STACKS as MAX_STACKS
from torchperfd_daemon.memory.summary import DeviceMemory as DeviceMemory
from torchperfd_daemon.memory.summary import MemorySummary as MemorySummary
from torchperfd_daemon.memory.summary import summarise as summarise
