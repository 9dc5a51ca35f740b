"""The flusher: one thread that drains the ring buffer and the recorder into totals and outbox."""

import sys
import threading
import time
from _thread import LockType
from collections import deque
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from torchperfd.hooks.instruments import Instruments, ProcessCounters
from torchperfd.hooks.thread_frames import framework_around
from torchperfd.link.outbox import FlushState, NextFlush, Outbox, next_flush
from torchperfd.model.loader_facts import LoaderFacts
from torchperfd.model.process import available_cpus
from torchperfd.steps.phases import TRAIN, StepBatch
from torchperfd.steps.step_series import Pace, StepBlocks
from torchperfd.steps.totals import Totals

if TYPE_CHECKING:
    from torchperfd.v1 import session_pb2

_MAX_FLUSH_S: Final = 10.0
"""Longest wait of a script that asks for a flush; reading a full buffer event by event takes a second."""
_MAX_WATCH_S: Final = 60.0
"""Longest time of frequent reports that one message of the daemon may begin."""
_STEPS_PER_REPORT: Final = 2000
"""Steps are reported once per second, or this many at once: the daemon pays per message, not per step."""


class Flusher:
    """Drains, adds up, packs and reports: once per second, every four seconds beside steps below 5 ms.

    While a live page shows the run it also reports the steps at half seconds.
    :mod:`~torchperfd.link.outbox` computes the times. It also flushes when the ring buffer is half
    full, when a report is requested, and when a daemon has just connected.

    The totals are correct with or without a daemon. Steps dropped by a full ring or outbox are counted by
    where they were dropped.

    Attributes:
        totals: Of all drained steps; replaced, never changed.
        blocks: Sums of consecutive steps.
        reports_blocks: Whether reports have these; set once the loop has ended.
    """

    def __init__(self, instruments: Instruments, outbox: "Outbox[session_pb2.ClientMessage]") -> None:
        self.totals = Totals()
        self.blocks = StepBlocks()
        self.reports_blocks = False
        self.failure = ""
        self.outcome = ""
        self._replay = instruments.replay
        self._recorder = instruments.replay.recorder
        self._names = instruments.names
        self._outbox = outbox
        self._faults = instruments.faults
        self._counters = ProcessCounters(instruments)
        self._pace = Pace()
        # Reentrant, since a signal handler of the script may come to it again on the same thread.
        self._lock = threading.RLock()
        self._is_flushing = False
        # put() may be called anywhere: it takes no lock that interrupted code could hold.
        self._wake: SimpleQueue[None] = SimpleQueue()
        # Locks to release after the next flush, and whether that is to report.
        self._requests: deque[tuple[LockType, bool]] = deque()
        self._is_running = False
        self._stopping = False
        self._watched_until = float("-inf")
        self._unsent: list[StepBatch] = []
        self._state = 0
        self._steps_say = 0
        self._framework = ""
        self._thread = threading.Thread(target=self._run, name="torchperfd-flusher", daemon=True)

    def start(self) -> None:
        self._is_running = True
        self._replay.read_elsewhere(self.refresh)
        self._thread.start()

    def abandon_in_child(self) -> None:
        """Mark the thread as ended, in a forked child."""
        self._is_running = False

    def dropped(self) -> dict[str, int]:
        """Return the steps lost so far: ``ring`` (never accounted for), ``outbox`` (never sent)."""
        return {"ring": self._recorder.dropped, "outbox": self._outbox.dropped}

    def report_frequently(self, seconds: float) -> None:
        """Report at half seconds as well, for so many seconds from now on; 0 ends that. Takes no lock."""
        was_watched = self.is_watched
        self._watched_until = time.monotonic() + min(seconds, _MAX_WATCH_S)
        if self.is_watched and not was_watched:
            self.wake()  # the next flush may be seconds away

    @property
    def is_watched(self) -> bool:
        """Whether it reports more often at present, because a live page shows the run."""
        return time.monotonic() < self._watched_until and self._replay.overhead.allows_extra_flushes

    def flush(
        self, *, report: bool = False, send: bool = False, again: bool = False, extra: bool = False
    ) -> None:
        """Drain once, now, on the calling thread.

        Args:
            report: Report what steps there were since the last report.
            send: Report, whether there were steps or not.
            again: Another flush comes by itself: a step that has begun may wait for it.
            extra: Regular flushes come as well: sampling is left to them, and reporting the totals.
        """
        with self._lock:
            if self._is_flushing:
                return  # a signal handler of the script has interrupted the flush on this very thread
            self._is_flushing = True
            try:
                self._flush(report=report, send=send, again=again, extra=extra)
            finally:
                self._is_flushing = False

    def refresh(self, *, send: bool = False) -> None:
        """Flush once on the flusher's thread and wait for that; on the calling thread where it has ended.

        A signal handler of the script may interrupt the wait and raise. It cannot interrupt the flush, as it
        would on the main thread, nor find a lock taken.
        """
        if self._replay.is_held_here:
            return  # a signal handler of the script has interrupted the reading on this very thread
        if not self._is_running or threading.get_ident() == self._thread.ident:
            self.flush(send=send)
            return
        done = threading.Lock()
        done.acquire()
        self._requests.append((done, send))
        if self._is_running:
            self.wake()
            done.acquire(timeout=_MAX_FLUSH_S)
        else:
            self.flush(send=send)  # it has just ended

    def _flush(self, *, report: bool, send: bool, again: bool, extra: bool) -> None:
        from torchperfd.link import wire
        from torchperfd.v1 import session_pb2

        # A new one: other threads, the script's signal handlers and forked children read it without a lock.
        totals = self.totals.copy()
        drained = self._replay.drain(again=again)
        totals.add(drained)
        self._counters.add_steps(drained)
        self._counters.fill(totals, samples=not extra)
        self.totals = totals
        self._pace.add(drained)
        for steps in drained:
            self.blocks.add(steps)
        self._unsent += drained
        if drained:
            training = drained[-1].kind[0] == TRAIN
            self._steps_say = session_pb2.RUN_STATE_TRAINING if training else session_pb2.RUN_STATE_VALIDATING
        state = session_pb2.RUN_STATE_CHECKPOINTING if self._counters.saving else self._steps_say
        if state and state != self._state:
            self._state = state
            self.announce(state)
        unsent = self._unsent
        due = report or sum(batch.count for batch in unsent) >= _STEPS_PER_REPORT
        if not send and not (unsent and due):
            return
        try:
            blocks = self.blocks.sums() if self.reports_blocks else None
            # A live page reads the totals every few seconds: more of them would only cost the daemon.
            message = (
                None
                if extra
                else wire.totals_to_message(
                    totals, self._names, self._recorder.recorded, self.dropped(), blocks
                )
            )
            arrivals = self._recorder.arrivals
            batch = wire.step_batch(unsent, self._names, arrivals.drain()) if unsent else None
        except Exception as error:  # noqa: BLE001 - the caller may be the script
            self._faults.note("report", error)
            return
        # One right after the other, so that they leave together.
        if batch:
            self._outbox.put(batch, weight=batch.steps.count)
            self._unsent = []
        if message:
            self._outbox.put_newest("account", message)

    def snapshot(self) -> Totals:
        """Return the totals of all drained steps; they do not change any more. Takes no lock."""
        return self.totals

    def step_seconds(self) -> float:
        """Return how long training steps take lately; 0 before the first."""
        return self._pace.step_ns / 1e9

    def unrecorded(self) -> dict[str, Any]:
        """Return facts on steps without a profiler, for the trace, beside their length.

        ``unrecorded_phase_ns``: means of the latest training steps, by phase.
        ``loader``: how they use their loader (:class:`~torchperfd.model.loader_facts.LoaderFacts`).
        """
        with self._lock:
            phases = {self._names.name(slot): round(ns) for slot, ns in self._pace.phase_ns().items()}
            facts: dict[str, Any] = {"unrecorded_phase_ns": phases}
            self._counters.fill_loader(self.totals)
            facts["loader"] = asdict(self.totals.loader or LoaderFacts(cpus=available_cpus()))
            return facts

    def announce(self, state: int) -> None:
        """Tell the daemon what the run is doing, a value of ``RunState``."""
        from torchperfd.v1 import session_pb2

        # Asked while the loop runs, which it does not yet when a script attaches.
        self._framework = self._framework or framework_around(self._replay.thread)
        change = session_pb2.StateChange(
            state=session_pb2.RunState.ValueType(state),
            framework=self._framework,
            failure=self.failure,
            outcome=self.outcome,
        )
        self._outbox.put_newest("state", session_pb2.ClientMessage(state=change))

    def announce_outcome(self, words: str) -> None:
        """Tell the daemon what the run has made of the promise of an earlier one; the run has ended."""
        from torchperfd.v1 import session_pb2

        self.outcome = words
        self.announce(session_pb2.RUN_STATE_FINISHED)

    def greet(self) -> None:
        """Bring a daemon that has just welcomed us up to date."""
        with self._lock:
            if self._state:
                self.announce(self._state)
        self.flush(send=True)

    def wake(self) -> None:
        """Flush now, and not only when it is time to."""
        self._wake.put(None)

    def stop(self, timeout: float) -> None:
        """End the thread; what is still in the recorder is drained by a last :meth:`flush`."""
        self._stopping = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._flush_until_stopped()
        finally:
            self._is_running = False
            self._answer()

    def _answer(self, up_to: int = sys.maxsize) -> None:
        while up_to and self._requests:
            self._requests.popleft()[0].release()
            up_to -= 1

    def _flush_until_stopped(self) -> None:
        while not self._stopping:
            due = self._wait()
            if self._stopping or self._faults.spent("flusher"):
                return
            requests = tuple(self._requests)
            try:
                if requests:
                    self.flush(report=due is not None, send=any(send for _, send in requests))
                else:
                    extra = due is not None and due.is_extra
                    self.flush(report=due is not None, again=True, extra=extra)
                    # Not where the script asks: a report must not begin a calibration.
                    trained_seconds = (self.totals.train.ns + self.totals.validate.ns) / 1e9
                    self._replay.overhead.on_flush(trained_seconds, extra=extra)
            except Exception as error:  # noqa: BLE001 - a thread of ours may fail, training may not
                self._faults.note("flusher", error)
            self._answer(len(requests))

    def _wait(self) -> NextFlush | None:
        """Wait for the next flush; return it if it is due, None if it was requested."""
        due = next_flush(
            FlushState(
                unix_seconds=time.time(),
                steps=self.totals.train.steps,
                step_seconds=self.step_seconds(),
                is_live=self._replay.live,
                is_watched=self.is_watched,
            )
        )
        try:
            self._wake.get(timeout=due.seconds)
        except Empty:
            return due
        return None
