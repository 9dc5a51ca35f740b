"""A process group with NCCL's kind of collectives: the host only launches them, and streams wait.

A collective begins when the last rank's stream has come to it, which the ranks find out over gloo. No values
are exchanged: each rank goes on with its own. A message between two ranks begins when both have come to it,
and arrives as zeros. Calls that only set a job up (broadcasts, barriers, objects that are gathered or sent)
go to gloo as they are.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.simulated_device.device import MESSAGE_S, Device, Stream
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore


def register(name: str, device: Device) -> None:
    """Make ``init_process_group(name)`` possible, on this device."""

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> SimulatedGroup:
        gloo, arrivals = (
            dist.ProcessGroupGloo(PrefixStore(purpose, store), rank, size, timeout)
            for purpose in ("gloo", "arrivals")
        )
        return SimulatedGroup(name, device, gloo, arrivals, rank, size)

    dist.Backend.register_backend(name, create, devices=["cpu"])


_SENDS, _RECEIVES = 1, 2
"""Tags of gloo's messages: that a rank has come to send, or to receive."""


class SimulatedWork(dist.Work):
    """A collective that was launched.

    Args:
        device: On whose current stream the result is awaited.
        result: What the collective leaves behind.
        stream: On which it runs; the device's for collectives if None.
    """

    def __init__(self, device: Device, result: Any, stream: Stream | None = None) -> None:
        super().__init__()
        self._device = device
        self._stream = stream or device.communication
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        # What a stream has yet to do, callers may go on with.
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Have the current stream wait; the host goes on."""
        self._device.compute.wait_stream(self._stream)
        return True

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return a future that has its value."""
        return self._future

    def is_completed(self) -> bool:
        """Return whether the host may go on: always."""
        return True


class SimulatedGroup(dist.ProcessGroup):
    """The ranks of a group.

    Args:
        name: The backend's.
        gloo: A group of the same ranks, for what really has to be exchanged.
        arrivals: Another one, for the collectives' stream alone.
    """

    def __init__(self, name: str, device: Device, gloo: Any, arrivals: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = name
        self._group_name = ""
        self._device = device
        self._gloo = gloo
        self._arrivals = arrivals

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """What torch calls the group."""
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def getBackendName(self) -> str:  # noqa: N802
        """Return what ``dist.get_backend()`` shows."""
        return self._name

    def allreduce(self, tensors: Any, *options: Any) -> SimulatedWork:
        """Launch a reduction behind the current stream's work."""
        return self._launch(tensors)

    def all_gather_single(self, output: Any, own: Any, *options: Any) -> SimulatedWork:
        """Launch a gathering; every part is the rank's own."""
        self._repeat(output, own)
        return self._launch(output)

    def reduce_scatter_single(self, output: Any, everything: Any, *options: Any) -> SimulatedWork:
        """Launch a scattering of the rank's own values."""
        self._take_part(output, everything)
        return self._launch(output)

    def all_gather_single_coalesced(self, outputs: Any, own: Any, *options: Any) -> SimulatedWork:
        """Launch a gathering; C++ asks for this one."""
        for output, part in zip(outputs, own, strict=True):
            self._repeat(output, part)
        return self._launch(outputs)

    def reduce_scatter_single_coalesced(self, outputs: Any, everything: Any, *options: Any) -> SimulatedWork:
        """Launch a scattering; C++ asks for this one."""
        for output, parts in zip(outputs, everything, strict=True):
            self._take_part(output, parts)
        return self._launch(outputs)

    # As releases of torch before 2.13 call them.
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def send(self, tensors: Any, peer: int, tag: int = 0) -> SimulatedWork:
        """Launch a message to a rank of the group; what is not of floats is sent for real."""
        if not tensors[0].is_floating_point():
            self._gloo.send(tensors, peer, tag).wait()
            return SimulatedWork(self._device, tensors)
        return self._launch_message(tensors, f"to {peer}", lambda now: self._meet(peer, now, _SENDS))

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> SimulatedWork:
        """Launch the other half of a message from a rank of the group."""
        if not tensors[0].is_floating_point():
            self._gloo.recv(tensors, peer, tag).wait()
            return SimulatedWork(self._device, tensors)
        with torch.no_grad():
            for tensor in tensors:
                tensor.zero_()
        return self._launch_message(tensors, f"from {peer}", lambda now: self._meet(peer, now, _RECEIVES))

    def allgather(self, outputs: Any, own: Any, options: Any = None) -> SimulatedWork:
        """Gather for real: only the set-up of a job does so."""
        self._gloo.allgather(outputs, own, options or AllgatherOptions()).wait()
        return SimulatedWork(self._device, outputs)

    def scatter(self, outputs: Any, inputs: Any, options: Any) -> SimulatedWork:  # type: ignore[override]
        """Scatter for real: only the set-up of a job does so."""
        self._gloo.scatter(outputs, inputs, options).wait()
        return SimulatedWork(self._device, outputs)

    def broadcast(self, tensors: Any, options: Any) -> SimulatedWork:  # type: ignore[override]
        """Broadcast for real: only the set-up of a job does so."""
        self._gloo.broadcast(tensors, options).wait()
        return SimulatedWork(self._device, tensors)

    def barrier(self, opts: Any = None) -> SimulatedWork:
        """Wait for all ranks, on the host."""
        self._device.compute.synchronize()
        self._gloo.barrier(dist.BarrierOptions()).wait()
        return SimulatedWork(self._device, [])

    def _repeat(self, output: Any, own: Any) -> None:
        output.view(self.size(), -1).copy_(own.clone().view(1, -1))

    def _take_part(self, output: Any, everything: Any) -> None:
        output.view(-1).copy_(everything.view(self.size(), -1)[self.rank()].clone())

    def _launch(self, result: Any) -> SimulatedWork:
        device = self._device
        device.communication.wait_stream(device.compute)
        device.communication.launch(self._exchange)
        if threading.current_thread() is threading.main_thread() and _is_in_backward():
            # DDP's reducer takes the future's value, and asks for no wait: the stream's own is queued here.
            torch.autograd.Variable._execution_engine.queue_callback(self._wait)
        return SimulatedWork(device, result)

    def _launch_message(self, result: Any, direction: str, meet: Callable[[float], float]) -> SimulatedWork:
        # A stream for each peer and direction: one message does not wait for another.
        stream = self._device.stream(f"{self._group_name} {direction}")
        stream.wait_stream(self._device.compute)
        stream.launch(meet)
        return SimulatedWork(self._device, result, stream)

    def _meet(self, peer: int, arrived: float, purpose: int) -> float:
        """Find out when the other rank has come to a message, too."""
        other = torch.zeros(1, dtype=torch.float64)
        sent = self._arrivals.send([torch.tensor([arrived], dtype=torch.float64)], peer, purpose)
        self._arrivals.recv([other], peer, _SENDS + _RECEIVES - purpose).wait()
        sent.wait()
        return max(arrived, float(other)) + MESSAGE_S

    def _wait(self) -> None:
        self._device.compute.wait_stream(self._device.communication)

    def _exchange(self, arrived: float) -> float:
        """Find out when the last rank has arrived; all clocks are one node's."""
        latest = torch.tensor([arrived], dtype=torch.float64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._arrivals.allreduce([latest], options).wait()
        return float(latest) + self._device.take_exchange_seconds()


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
