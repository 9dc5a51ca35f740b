"""A device whose stream works by command, and a script that marks its phases on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchperfd.hooks.cuda import record_without_stream
from torchperfd.hooks.device_clock import NO_PHASE, DeviceTimes


class Device:
    """One stream, in nanoseconds of its own: what was launched, and how far the device has come."""

    def __init__(self) -> None:
        self.launched = 0
        self.done = 0
        self.capturing = False
        self.apart = 0
        self.made: list[FakeEvent] = []

    def launch(self, ns: int) -> None:
        self.launched += ns

    def run(self, ns: int | None = None) -> None:
        """Work for that long, or until nothing is left to do."""
        self.done = self.launched if ns is None else min(self.launched, self.done + ns)

    def event(self) -> "FakeEvent":
        self.made.append(FakeEvent(self))
        return self.made[-1]

    @contextmanager
    def kept_apart(self, event: "FakeEvent") -> Iterator[bool]:
        assert event.at >= 0, "this event was never recorded"
        self.apart += 1
        try:
            yield True
        finally:
            self.apart -= 1

    def times(self, capacity: int = 64) -> DeviceTimes:
        return DeviceTimes(
            self.event, record_without_stream, lambda: self.capturing, self.kept_apart, capacity
        )


class FakeEvent:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = -1

    def record(self) -> None:
        assert not self.device.capturing, "an event in a graph has no time"
        self.at = self.device.launched

    def query(self) -> bool:
        assert self.device.apart, "this query would fail another thread's graph capture"
        assert self.at >= 0
        return self.device.done >= self.at

    def elapsed_time(self, end_event: "FakeEvent", /) -> float:
        if not (self.query() and end_event.query()):
            raise RuntimeError("the device is not there yet")
        return (end_event.at - self.at) / 1e6


class Script:
    """Marks boundaries and reports them, as the hooks and the replay do, at once."""

    def __init__(self, capacity: int = 64) -> None:
        self.device = Device()
        self.times = self.device.times(capacity)

    def boundary(self, phase: int) -> int:
        cuda_event_id = self.times.mark()
        self.times.boundary(phase, cuda_event_id)
        return cuda_event_id

    def work(self, phase: int, ns: int) -> int:
        """Launch work, and mark the boundary after it."""
        self.device.launch(ns)
        return self.boundary(phase)

    def phase(self, phase: int, ns: int) -> None:
        """Between the boundary before and the next, the device works for ``phase``."""
        self.work(phase, ns)
        self.times.call(phase)

    def play(self, *events: tuple[Any, ...]) -> None:
        """Call methods of the script, or of its times, by name."""
        for name, *arguments in events:
            (getattr(self, name, None) or getattr(self.times, name))(*arguments)


def begun(*events: tuple[Any, ...], capacity: int = 64) -> Script:
    """Return a script that has marked where its first phase begins, and has played events."""
    script = Script(capacity)
    script.boundary(NO_PHASE)
    script.play(*events)
    return script
