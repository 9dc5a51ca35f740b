"""The parts that a client composes, for benchmarks and tests; they may change with any version."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchperfd.captures.manager import CaptureManager
from torchperfd.daemon_session import DaemonSession
from torchperfd.identity import Identity
from torchperfd.instruments import Instruments
from torchperfd.link.flusher import Flusher
from torchperfd.link.outbox import Outbox
from torchperfd.link.stream import Stream
from torchperfd.loggers.outputs import Outputs
from torchperfd.stacks import StackReporter

if TYPE_CHECKING:
    from torchperfd.v1 import session_pb2


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one client.

    Attributes:
        identity: The process's run, rank and node.
        instruments: The hooks, and everything that measures.
        flusher: Drains the ring buffer and reports.
        outbox: The messages that wait for the daemon.
        daemon_session: Handles the daemon's commands.
        stream: The connection to the daemon.
        stacks: Reports the threads' stacks.
        captures: Starts captures.
        outputs: The loggers, and the process's own metrics page.
    """

    identity: Identity
    instruments: Instruments
    flusher: Flusher
    outbox: "Outbox[session_pb2.ClientMessage]"
    daemon_session: DaemonSession
    stream: Stream
    stacks: StackReporter
    captures: CaptureManager
    outputs: Outputs
