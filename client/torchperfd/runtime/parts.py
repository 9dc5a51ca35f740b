"""The parts of one client, put together: the composition root of the training process.

An integration gets only :class:`IntegrationPort`, the operations that a framework's loop needs.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torchperfd.captures.manager import CaptureManager
from torchperfd.captures.out_of_memory import OutOfMemory
from torchperfd.hooks.process_groups import read_coordinates
from torchperfd.link.flusher import Flusher
from torchperfd.link.outbox import Outbox
from torchperfd.link.process_counters import ProcessCounters
from torchperfd.link.stack_reporter import StackReporter
from torchperfd.link.stream import Stream
from torchperfd.loggers.outputs import Outputs
from torchperfd.model.identity import Identity
from torchperfd.runtime.daemon_session import DaemonSession
from torchperfd.runtime.instruments import Instruments
from torchperfd.safety.descriptors import DescriptorGuard
from torchperfd.safety.logs import Faults
from torchperfd.v1 import contract

if TYPE_CHECKING:
    from torch import nn

    from torchperfd.model.card import VerdictCard
    from torchperfd.v1 import session_pb2


@dataclass(frozen=True, slots=True)
class IntegrationPort:
    """The client's operations for frameworks' loops.

    Attributes:
        mark: Writes an event, a code and an argument, on the training thread; returns whether this is it.
        here: Returns whether this is the training thread.
        slot: Returns the slot of a phase, built in or one of at most 16 others; past those, ``other``'s.
        watch_model: Has the forward of a model timed.
        flush: Sends what was measured so far.
        faults: Where failures of ours are counted.
    """

    mark: Callable[[int, int], bool]
    here: Callable[[], bool]
    slot: Callable[[str], int]
    watch_model: Callable[["nn.Module"], None]
    flush: Callable[[], None]
    faults: Faults


_OUTBOX_STEPS: Final = 40_000
_LOGGED_VERDICT_S: Final = 0.2
"""How long a logger waits for a verdict; at the exit this is part of the one second."""
END_VERDICT_S: Final = 0.35
"""At the end of a run, for how long the node's daemon asks those of other nodes for the verdict."""


class Parts:
    """Puts the parts of one client together, starts and stops them.

    Args:
        identity: The process's run, rank and node.
        instruments: The hooks, and everything that measures.

    Attributes:
        identity: As given.
        instruments: As given.
        flusher: Drains the ring buffer and reports.
        outbox: The messages that wait for the daemon.
        daemon_session: Handles the daemon's commands.
        stream: The connection to the daemon.
        stacks: Reports the threads' stacks.
        captures: Starts captures.
        out_of_memory: Leaves a snapshot when CUDA has no memory left.
        outputs: The loggers, and the process's own metrics page.
        integration_port: What integrations may do.
        has_ended: Whether the loop is over.
    """

    def __init__(self, identity: Identity, instruments: Instruments) -> None:
        self.identity = identity
        self.instruments = instruments
        self.has_ended = False
        buffer, replay, names = instruments.buffer, instruments.replay, instruments.names
        faults = instruments.faults
        self.outbox: Outbox[session_pb2.ClientMessage] = Outbox(_OUTBOX_STEPS)
        self.captures = CaptureManager(
            replay,
            identity,
            self.outbox,
            lambda: self.flusher.step_seconds(),
            names.name,
            lambda: self.flusher.unrecorded(),
        )
        self.stacks = StackReporter(buffer, replay, names, self.outbox, instruments.worker_stacks, faults)
        counters = ProcessCounters(
            replay,
            instruments.pauses,
            instruments.compilations,
            instruments.background_saves,
            instruments.accelerator,
            instruments.loader,
            instruments.sync_waits,
            instruments.settings,
            instruments.script_collectives,
            hooks=instruments.hook_states,
            coordinates=lambda: read_coordinates(instruments.hooks.places),
        )
        self.flusher = Flusher(replay, names, self.outbox, faults, counters)
        buffer.on_low = self.flusher.wake
        self.daemon_session = DaemonSession(
            identity,
            self.flusher,
            self.stacks,
            self.captures,
            self.outbox,
            lambda: self.stream.session,
            lambda: (self.stream.peer_uid, self.stream.socket),
            lambda *asked: self.stream.download(*asked),
            faults,
        )
        self._guard = DescriptorGuard(self._give_up_descriptors)
        self.stream = Stream(
            sockets=contract.socket_candidates(),
            hello=self.daemon_session.hello,
            outbox=self.outbox,
            on_welcome=self.daemon_session.on_welcome,
            on_command=self.daemon_session.handle_command,
            faults=faults,
            guard=self._guard,
        )
        self.out_of_memory = OutOfMemory(
            self.captures.directory,
            identity,
            lambda: replay.loop.train_steps,
            lambda seconds: self.stream.get_run(identity.run, seconds),
            faults,
        )
        self.outputs = Outputs(
            identity,
            names,
            faults,
            self.flusher.snapshot,
            lambda: self.flusher.totals.train.steps,
            lambda: self.verdict(_LOGGED_VERDICT_S),
        )
        self.integration_port = IntegrationPort(
            mark=buffer.mark,
            here=buffer.here,
            slot=names.slot,
            watch_model=instruments.hooks.add_model,
            flush=lambda: self.flusher.refresh(send=True),
            faults=faults,
        )

    def verdict(self, timeout: float) -> "VerdictCard | None":
        """Return the card of the daemon's verdict on the run; None if it has none, or does not answer."""
        from torchperfd.model.card import card_of

        end_seconds = END_VERDICT_S if self.has_ended else 0.0
        answer = self.stream.get_run(self.identity.run, timeout + end_seconds, end_seconds)
        return card_of(answer.verdict) if answer is not None and answer.HasField("verdict") else None

    def start(self) -> None:
        """Start all threads, and touch torch once it has been imported."""
        self.flusher.start()
        self._guard.install()
        self.stream.start()
        self.stacks.register_signal(self.stream.native_id)
        self._guard.guard(self.stacks.descriptors)
        self.instruments.install(self._torch_is_imported, untraced=Flusher)

    def stop(self, deadline: float) -> None:
        """End all threads, waiting for the daemon until ``deadline`` on the monotonic clock at most."""
        self.outputs.close()
        self.out_of_memory.end()
        self.flusher.stop(0.1)
        self.leave_daemon(deadline)
        self._guard.uninstall()
        self.stacks.unregister_signal()
        self.outputs.join(deadline)

    def leave_daemon(self, deadline: float) -> None:
        """End the session after what waits for the daemon was sent, or at ``deadline``."""
        if self.stream.connected:
            self.daemon_session.close()
        self.daemon_session.rendezvous.stop(0.1)
        self.stream.stop(max(0.1, deadline - time.monotonic()))

    def abandon_in_child(self) -> None:
        """Do nothing ever again: the caller is a forked child, which has none of the threads."""
        self.instruments.buffer.thread = 0
        self.flusher.abandon_in_child()
        self.instruments.accelerator.end("forked")
        self.stacks.unregister_signal()
        self.stream.abandon_in_child()

    def _torch_is_imported(self) -> None:
        self.captures.torch_ready.set()
        self.out_of_memory.torch_is_imported()

    def _give_up_descriptors(self) -> None:
        """The script is about to close them: gRPC would end the process, and faulthandler write elsewhere."""
        self.stacks.unregister_signal()
        self.stream.drop()
