"""Streams that work through what was launched on them, and events between."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

QUEUE_LENGTH: Final = 1024
"""What may be launched on a stream and not yet done, as on GPUs; then the host waits."""

EXCHANGE_S: Final = 0.001
"""What a collective takes once the last rank is there."""

MESSAGE_S: Final = 0.0005
"""What a message takes once both ranks are there."""

_FULL_S: Final = 0.0002
"""How long the host sleeps before it looks again whether a full queue has room."""

_Work = Callable[[float], float]
"""From the time at which a stream comes to it to the time at which it has ended, in monotonic seconds."""


class Recording:
    """One point in the work of a stream.

    Attributes:
        seconds: When the stream passed it; 0 before.
        has_passed: Whether it has.
    """

    __slots__ = ("_waiters", "has_passed", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.has_passed = False
        self._waiters: deque[threading.Event] = deque()

    def __call__(self, now: float) -> float:
        """Let it pass: the work of which it is the end."""
        self.seconds, self.has_passed = now, True
        while self._waiters:
            self._waiters.popleft().set()
        return now

    def wait(self) -> None:
        """Wait until the stream has passed it."""
        if self.has_passed:
            return
        waiter = threading.Event()
        self._waiters.append(waiter)
        # In this order: it may pass meanwhile.
        if not self.has_passed:
            waiter.wait()


class Event:
    """A point in the work of a stream, with the methods of ``torch.cuda.Event(enable_timing=True)``."""

    def __init__(self, device: "Device") -> None:
        self._device = device
        self.recording = Recording()

    @property
    def seconds(self) -> float:
        return self.recording.seconds

    def record(self, stream: "Stream | None" = None) -> None:
        """Put the event behind all work of a stream; of the device's own if None."""
        self.recording = Recording()
        (stream or self._device.compute).launch(self.recording)

    def query(self) -> bool:
        return self.recording.has_passed

    def elapsed_time(self, end_event: "Event") -> float:
        """Return the milliseconds from this event to another; the streams have passed both."""
        return (end_event.seconds - self.seconds) * 1e3

    def synchronize(self) -> None:
        """Wait until the stream has passed it."""
        self.recording.wait()


class Stream:
    """Work in order, on a thread of its own. Its clock is exact: late wake-ups of the thread do not add up.

    Args:
        name: Of the thread.
    """

    def __init__(self, device: "Device", name: str) -> None:
        self._device = device
        # As cheap as a launch should be; one that is bounded takes ten times as long.
        self._queue: queue.SimpleQueue[tuple[_Work, float] | None] = queue.SimpleQueue()
        self._now = 0.0
        self._thread = threading.Thread(target=self._execute, name=name, daemon=True)
        self._thread.start()

    def launch(self, work: _Work) -> None:
        """Put work behind what there is; waits only while the queue is full."""
        while self._queue.qsize() >= QUEUE_LENGTH:
            time.sleep(_FULL_S)
        self._queue.put((work, time.monotonic()))

    def launch_kernel(self, seconds: float) -> None:
        """Launch a kernel that takes so long."""
        self.launch(lambda now: now + seconds)

    def wait_event(self, event: Event) -> None:
        """Have the work that follows wait for an event of another stream; the host does not wait."""
        recording = event.recording

        def wait(now: float) -> float:
            recording.wait()
            return max(now, recording.seconds)

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
        self._streams: dict[str, Stream] = {}

    def stream(self, name: str) -> Stream:
        """Return the stream of this name, which is made the first time."""
        if name not in self._streams:
            self._streams[name] = Stream(self, f"simulated-{name}")
        return self._streams[name]

    def event(self) -> Event:
        return Event(self)

    def close(self) -> None:
        """End its threads, once all work is done."""
        self.compute.close()
        self.communication.close()
        for stream in self._streams.values():
            stream.close()

    def take_exchange_seconds(self) -> float:
        """Return what a collective takes once the last rank is there."""
        extra, self.extra_exchange_seconds = self.extra_exchange_seconds, 0.0
        return EXCHANGE_S + extra
