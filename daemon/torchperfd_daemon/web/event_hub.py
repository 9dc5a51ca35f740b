"""The events of all runs for all streams: looks at what has changed, only while a client listens."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from torchperfd._version import __revision__, __version__
from torchperfd.model.verdict_document import verdict_to_document
from torchperfd.v1 import control_pb2
from torchperfd_daemon.captures.manifest import CaptureRecord
from torchperfd_daemon.diagnosis.verdict import Verdict
from torchperfd_daemon.service.translate_diagnosis import run_verdict_to_message
from torchperfd_daemon.store.model import HISTORY_STEPS
from torchperfd_daemon.store.store import Rank
from torchperfd_daemon.views import history
from torchperfd_daemon.views.model import rank_state
from torchperfd_daemon.web.access import Access, Parts
from torchperfd_daemon.web.captures_api import capture_dict
from torchperfd_daemon.web.endpoint import EventStream, event
from torchperfd_daemon.web.run_rows import run_state

log = logging.getLogger("torchperfd.http")

MAX_STREAMS: Final = 16
MAX_OF_STRANGERS: Final = 8
"""Streams without the token, so that no user can take the places of its holders."""

_MAX_WAIT_S: Final = 1.0
# Ranks report at the same moment: what they send then goes out as one event.
_TOGETHER_S: Final = 0.05
# Ranks that a page shows report each half second, all at the same moment.
_MIN_SPAN_S: Final = 0.4
_VERDICT_S: Final = 5.0
# A page reads the history first, and its answer may be a second old.
_OVERLAP_S: Final = 10.0


class _RankCursor:
    """How far a rank's steps were sent."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.steps = rank.history.seen
        self.second = rank.seconds.newest - 1


class _RunCursor:
    """What the streams know of a run."""

    def __init__(self) -> None:
        self.ranks: dict[int, _RankCursor] = {}
        self.state = ""
        self.states: list[tuple[int, str, float]] = []
        self.verdict: Verdict | None = None
        self.verdict_at = float("-inf")


class EventHub:
    """Sends each change to the streams that follow it.

    Args:
        verdict: Returns the published verdict on a run.
        clock: Monotonic seconds.
        wall: Unix seconds.
    """

    def __init__(
        self,
        parts: Parts,
        verdict: Callable[[str], Verdict | None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._parts = parts
        self._verdict = verdict
        self._clock = clock
        self._wall = wall
        self._streams: list[EventStream] = []
        self._runs: dict[str, _RunCursor] = {}
        self._names: list[str] = []
        self._captures: dict[str, tuple[CaptureRecord, object]] = {}
        self._closed = False
        self._listened = asyncio.Event()
        self._stepped = asyncio.Event()
        parts.store.on_steps = self._stepped.set

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, run: str, ranks: frozenset[int] | None, access: Access) -> EventStream | None:
        """Return a new stream; None where there are too many, or the daemon stops.

        The oldest stream without the token gives way to a new one where there is no room.
        """
        if self._closed or not self._make_room(access):
            return None
        stream = EventStream(run, ranks, access)
        hello = {
            "api": 1,
            "version": __version__,
            "revision": __revision__ or None,
            "node": self._parts.node,
            "instance": self._parts.instance,
            "run": run or None,
            "access": access.value,
        }
        stream.push(event("hello", hello))
        if not self._streams:
            # What happened while no client listened is in the history.
            self._runs.clear()
            self._captures.clear()
            self._names = []
        self._catch_up(stream)
        self._streams.append(stream)
        self.send_changes()
        self._greet(stream)
        self._watch()
        self._listened.set()
        return stream

    def _make_room(self, access: Access) -> bool:
        """Return whether there is room for a stream; the oldest one of a stranger may have to end for it."""
        strangers = [stream for stream in self._streams if stream.access is Access.STRANGER]
        is_full = len(self._streams) >= MAX_STREAMS
        if is_full or (access is Access.STRANGER and len(strangers) >= MAX_OF_STRANGERS):
            if not strangers:
                return False
            strangers[0].close(event("bye", {"reason": "too many pages without the token listen"}))
            self._streams.remove(strangers[0])
        return True

    def close_stream(self, stream: EventStream) -> None:
        """Forget a stream whose client has left."""
        with contextlib.suppress(ValueError):
            self._streams.remove(stream)
        self._watch()
        if not self._streams:
            self._listened.clear()

    def close(self, reason: str) -> None:
        """End all streams."""
        self._closed = True
        for stream in self._streams:
            stream.close(event("bye", {"reason": reason}))

    async def run(self) -> None:
        """Send changes until cancelled; sleeps while no client listens."""
        while True:
            await self._listened.wait()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stepped.wait(), _MAX_WAIT_S)
                await asyncio.sleep(_TOGETHER_S)
            # Not before the wait: what came during the pause after the last events would stay for a second.
            self._stepped.clear()
            try:
                self._watch()
                self.send_changes()
            except Exception:
                # A failure here must not end the daemon.
                log.exception("events could not be sent")
            await asyncio.sleep(_MIN_SPAN_S - _TOGETHER_S)

    def _watch(self) -> None:
        """Have the ranks of the runs that streams follow report more often."""
        self._parts.watch(frozenset(stream.run for stream in self._streams if stream.run))

    def send_mark(self, run: str, mark: dict[str, Any]) -> None:
        """Send a mark to those who follow its run."""
        self._send("mark", {"run": run, "mark": mark}, run)

    def send_capture(self, record: CaptureRecord) -> None:
        """Send a capture's present state, also of one that this daemon does not conduct."""
        for access in {stream.access for stream in self._streams}:
            data = event("capture", {"capture": capture_dict(record, access)})
            self._push(data, self._following(record.run, access))

    def send_changes(self) -> None:
        """Send what has changed since the last time."""
        runs = self._parts.store.runs()
        names = [*runs]
        if names != self._names:
            if self._names or self._runs:
                self._push(event("runs", {"runs": names}), self._streams)
            self._names = names
            for gone in self._runs.keys() - runs.keys():
                del self._runs[gone]
        followed = {stream.run for stream in self._streams}
        for name, ranks in runs.items():
            if "" in followed or name in followed:
                self._look_at(name, ranks, with_steps=name in followed)
        self._look_at_captures()

    def _look_at(self, name: str, ranks: list[Rank], *, with_steps: bool) -> None:
        cursor = self._runs.setdefault(name, _RunCursor())
        states = [(rank.identity.rank, rank_state(rank), round(rank.stalled_seconds, 1)) for rank in ranks]
        if states != cursor.states:
            cursor.state, cursor.states = run_state(ranks), states
            self._send("run", _states_dict(name, cursor), name)
        verdict, now = self._verdict(name), self._clock()
        is_due = now - cursor.verdict_at >= _VERDICT_S
        is_first = cursor.verdict_at == float("-inf")
        if is_first or (verdict != cursor.verdict and (is_due or _kind(verdict) != _kind(cursor.verdict))):
            cursor.verdict, cursor.verdict_at = verdict, now
            self._send_verdict(name, ranks, verdict, self._streams)
        if with_steps:
            self._send_steps(name, cursor, ranks)

    def _send_steps(self, name: str, cursor: _RunCursor, ranks: list[Rank]) -> None:
        steps: dict[int, msgspec.Raw] = {}
        seconds: dict[int, msgspec.Raw] = {}
        now = self._wall()
        followed = [stream.ranks for stream in self._streams if stream.run == name]
        wanted = None if None in followed else frozenset[int]().union(*filter(None, followed))
        for rank in ranks:
            number = rank.identity.rank
            if wanted is not None and number not in wanted:
                cursor.ranks.pop(number, None)
                continue
            at = cursor.ranks.get(number)
            if at is None or at.rank is not rank:
                at = cursor.ranks[number] = _RankCursor(rank)
            new = min(rank.history.seen - at.steps, HISTORY_STEPS)
            if new > 0:
                at.steps = rank.history.seen
                steps[number] = _raw(number, history.steps_dict(rank, new, 0.0, phases=True))
            if history.newest_whole(rank, now) <= at.second:
                continue
            found = history.whole_seconds(rank, at.second, now)
            if len(found.unix_seconds):
                at.second = int(found.unix_seconds[-1])
                seconds[number] = _raw(number, history.seconds_dict(found, phases=True))
        self._send_ranks("steps", name, steps, self._streams)
        self._send_ranks("seconds", name, seconds, self._streams)

    def _send_ranks(
        self, kind: str, run: str, by_rank: dict[int, msgspec.Raw], streams: Iterable[EventStream]
    ) -> None:
        made: dict[frozenset[int] | None, bytes] = {}
        for stream in streams:
            if stream.run != run:
                continue
            if stream.ranks not in made:
                wanted = [
                    raw for rank, raw in by_rank.items() if stream.ranks is None or rank in stream.ranks
                ]
                made[stream.ranks] = event(kind, {"run": run, "ranks": wanted}) if wanted else b""
            if made[stream.ranks]:
                stream.push(made[stream.ranks])

    def _look_at_captures(self) -> None:
        for record in self._parts.coordinator.live_records:
            self._captures.setdefault(record.capture_id, (record, None))
        for capture_id, (record, sent) in list(self._captures.items()):
            state = (record.state, record.reason, [(rank.state, rank.reason) for rank in record.ranks])
            if state != sent:
                self._captures[capture_id] = record, state
                self.send_capture(record)
            if record.state.ended and self._parts.coordinator.live_record(capture_id) is None:
                del self._captures[capture_id]

    def _catch_up(self, stream: EventStream) -> None:
        """Send a new stream the newest steps and seconds again, so that none is missing after the history."""
        now = self._wall()
        steps: dict[int, msgspec.Raw] = {}
        seconds: dict[int, msgspec.Raw] = {}
        for rank in self._parts.store.runs().get(stream.run, []):
            number = rank.identity.rank
            if stream.ranks is not None and number not in stream.ranks:
                continue
            newest = history.steps_dict(rank, HISTORY_STEPS, now - _OVERLAP_S, phases=True)
            if newest["step_seconds"]:
                steps[number] = _raw(number, newest)
            found = history.whole_seconds(rank, int(now - _OVERLAP_S), now)
            if len(found.unix_seconds):
                seconds[number] = _raw(number, history.seconds_dict(found, phases=True))
        self._send_ranks("steps", stream.run, steps, [stream])
        self._send_ranks("seconds", stream.run, seconds, [stream])

    def _greet(self, stream: EventStream) -> None:
        """Send a new stream what holds now, which the others know."""
        for name, ranks in self._parts.store.runs().items():
            cursor = self._runs.get(name)
            if cursor is not None and stream.run in ("", name) and len(self._streams) > 1:
                stream.push(event("run", _states_dict(name, cursor)))
                self._send_verdict(name, ranks, cursor.verdict, [stream])
        if len(self._streams) > 1:
            for record, _ in self._captures.values():
                if stream.run in ("", record.run):
                    stream.push(event("capture", {"capture": capture_dict(record, stream.access)}))

    def _send_verdict(
        self, run: str, ranks: list[Rank], verdict: Verdict | None, streams: Iterable[EventStream]
    ) -> None:
        users = [rank.process.uid for rank in ranks]
        for stream in streams:
            if stream.run not in ("", run):
                continue
            shown = None
            if verdict is not None:
                message: control_pb2.Verdict = run_verdict_to_message(verdict, ranks)
                stream.access.call().rights.redact_verdict(message, users)
                shown = verdict_to_document(message)
            stream.push(event("verdict", {"run": run, "verdict": shown}))

    def _send(self, kind: str, data: object, run: str) -> None:
        self._push(event(kind, data), self._following(run))

    def _following(self, run: str, access: Access | None = None) -> list[EventStream]:
        return [
            stream
            for stream in self._streams
            if stream.run in ("", run) and (access is None or stream.access is access)
        ]

    def _push(self, data: bytes, streams: Iterable[EventStream]) -> None:
        for stream in streams:
            stream.push(data)


def _kind(verdict: Verdict | None) -> object:
    """Return what of a verdict is worth an event at once; its cost and evidence change all the time."""
    return None if verdict is None else (verdict.cause, verdict.rank, verdict.phase)


def _states_dict(run: str, cursor: _RunCursor) -> dict[str, Any]:
    return {
        "run": run,
        "state": cursor.state,
        "ranks": [
            {"rank": rank, "state": state, "stalled_seconds": stalled or None}
            for rank, state, stalled in cursor.states
        ],
    }


def _raw(rank: int, columns: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode({"rank": rank, **columns}))
