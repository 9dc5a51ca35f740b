"""Streams that work through what was launched on them, and events between."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Final

QUEUE_LENGTH: Final = 1024
"""What may be launched on a stream and not yet done, as on GPUs; then the host waits."""

EXCHANGE_S: Final = 0.001
"""What a collective takes once the last rank is there."""

_Work = Callable[[float], float]
"""From the time at which a stream comes to it to the time at which it has ended, in monotonic seconds."""


class Event:
    """A point in the work of a stream, with the methods of ``torch.cuda.Event(enable_timing=True)``."""

    def __init__(self, device: "Device") -> None:
        self._device = device
        self._passed = threading.Event()
        self.seconds = 0.0

    def record(self, stream: "Stream | None" = None) -> None:
        """Put the event behind all work of a stream; of the device's own if None."""
        self._passed = passed = threading.Event()

        def note(now: float) -> float:
            self.seconds = now
            passed.set()
            return now

        (stream or self._device.compute).launch(note)

    def query(self) -> bool:
        """Return whether the stream has passed it."""
        return self._passed.is_set()

    def elapsed_time(self, end_event: "Event") -> float:
        """Return the milliseconds from this event to another; the streams have passed both."""
        return (end_event.seconds - self.seconds) * 1e3

    def synchronize(self) -> None:
        """Wait until the stream has passed it."""
        self._passed.wait()


class Stream:
    """Work in order, on a thread of its own. Its clock is exact: late wake-ups of the thread do not add up.

    Args:
        name: Of the thread.
    """

    def __init__(self, device: "Device", name: str) -> None:
        self._device = device
        self._queue: queue.Queue[tuple[_Work, float] | None] = queue.Queue(QUEUE_LENGTH)
        self._now = 0.0
        self._thread = threading.Thread(target=self._execute, name=name, daemon=True)
        self._thread.start()

    def launch(self, work: _Work) -> None:
        """Put work behind what there is; waits only while the queue is full."""
        self._queue.put((work, time.monotonic()))

    def launch_kernel(self, seconds: float) -> None:
        """Launch a kernel that takes so long."""
        self.launch(lambda now: now + seconds)

    def wait_event(self, event: Event) -> None:
        """Have the work that follows wait for an event of another stream; the host does not wait."""

        def wait(now: float) -> float:
            event.synchronize()
            return max(now, event.seconds)

        self.launch(wait)

    def wait_stream(self, stream: "Stream") -> None:
        """Have the work that follows wait for all that another stream has now."""
        event = Event(self._device)
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        """Wait until all work is done, as ``loss.item()`` does."""
        event = Event(self._device)
        event.record(self)
        event.synchronize()

    def close(self) -> None:
        """End the thread, once all work is done."""
        self._queue.put(None)
        self._thread.join()

    def _execute(self) -> None:
        while (launch := self._queue.get()) is not None:
            work, launched = launch
            # An idle stream begins at the launch, a busy one where the work before has ended.
            self._now = work(max(self._now, launched))
            # What waits for this work must not continue before it has ended.
            if (left := self._now - time.monotonic()) > 0:
                time.sleep(left)


class Device:
    """The device of one process.

    Attributes:
        compute: The current stream, on which kernels run.
        communication: The stream of collectives.
        extra_exchange_seconds: What the next collective takes more.
    """

    def __init__(self) -> None:
        self.compute = Stream(self, "simulated-compute")
        self.communication = Stream(self, "simulated-communication")
        self.extra_exchange_seconds = 0.0

    def event(self) -> Event:
        """Return a new event."""
        return Event(self)

    def close(self) -> None:
        """End its threads, once all work is done."""
        self.compute.close()
        self.communication.close()

    def take_exchange_seconds(self) -> float:
        """Return what a collective takes once the last rank is there."""
        extra, self.extra_exchange_seconds = self.extra_exchange_seconds, 0.0
        return EXCHANGE_S + extra
