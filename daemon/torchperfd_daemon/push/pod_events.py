"""Writes an Event on the pod of a run whose verdict stands, one for each verdict.

The name of an Event follows from what it is about. So a daemon that starts anew writes none twice: the API
server has it already, for as long as it keeps Events.
"""

import asyncio
import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from torchperfd.model.formatting import one_line
from torchperfd_daemon.background import WorkerHealth
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.ownership import Pod
from torchperfd_daemon.push.cluster import Cluster, ClusterError
from torchperfd_daemon.push.sender import EventCounts, Sender
from torchperfd_daemon.store.model import RankIdentity
from torchperfd_daemon.store.store import Rank

STANDING_S: Final = 600.0
"""How long a verdict has to stand; short ones are no reason to look at a pod."""
PERIOD_S: Final = 10.0
FIRST_DELAY_S: Final = 60.0
MAX_DELAY_S: Final = 600.0
MAX_PER_HOUR: Final = 60
"""Events of one daemon: the API server is everybody's."""

_HOUR_S: Final = 3600.0
_MAX_MESSAGE: Final = 1000
_MAX_POD_NAME: Final = 200

log = logging.getLogger("torchperfd.events")

_Key = tuple[str, Cause, int | None]
"""Run, cause and rank: two verdicts that agree in these are one, whatever their figures."""


@dataclass(frozen=True, slots=True)
class _Due:
    """An Event that is to be written."""

    key: _Key
    pod: Pod
    event: Mapping[str, Any]


class PodEvents:
    """Watches the verdicts, and writes Events.

    Args:
        runs: Returns the ranks of each run that are on this node.
        verdicts: Returns all published verdicts on a run.
        pod_of: Returns the pod of a rank; None if it is not known.
        node: The node's name, as the source of Events.
    """

    def __init__(
        self,
        cluster: Cluster,
        runs: Callable[[], Mapping[str, Sequence[Rank]]],
        verdicts: Callable[[str], Iterable[Verdict]],
        pod_of: Callable[[RankIdentity], Pod | None],
        node: str,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = cluster
        self._runs = runs
        self._verdicts = verdicts
        self._pod_of = pod_of
        self._node = node
        self._clock = clock
        self._wall = wall
        self._sender = Sender("pod-events")
        self._since: dict[_Key, float] = {}
        self._written: set[_Key] = set()
        self._tried_at: list[float] = []
        self._delay = 0.0
        self._not_before = 0.0
        self.counts = EventCounts()
        self.health = WorkerHealth("events", period_seconds=PERIOD_S)

    async def run(self) -> None:
        """Look at the verdicts every few seconds until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                self.check()
            except Exception:
                if self.health.failed():
                    log.exception("verdicts cannot be written to pods")

    def check(self) -> None:
        """Look at the verdicts once; start to write those that are due, unless the writer is busy."""
        runs = self._runs()
        standing = {key: (verdict, runs[key[0]]) for key, verdict in self._standing(runs)}
        now = self._clock()
        self._since = {key: self._since.get(key, now) for key in standing}
        if self._sender.is_busy or now < self._not_before:
            return
        self._written &= standing.keys()
        self._tried_at = [at for at in self._tried_at if now - at < _HOUR_S]
        due = list(itertools.islice(self._due(standing, now), max(0, MAX_PER_HOUR - len(self._tried_at))))
        if due:
            self._sender.start(lambda: self._write(due))

    def close(self) -> None:
        """End the thread; one whose server hangs is left behind after a second."""
        self._sender.close()

    def _standing(self, runs: Iterable[str]) -> Iterator[tuple[_Key, Verdict]]:
        for run in runs:
            for verdict in self._verdicts(run):
                if verdict.cause not in (Cause.NONE, Cause.UNKNOWN):
                    yield (run, verdict.cause, verdict.rank), verdict

    def _due(self, standing: Mapping[_Key, tuple[Verdict, Sequence[Rank]]], now: float) -> Iterator[_Due]:
        for key, (verdict, ranks) in standing.items():
            if key in self._written or now - self._since[key] < STANDING_S:
                continue
            pod = self._pod_of(_subject(verdict, ranks).identity)
            if pod is not None:
                wall = self._wall()
                event = event_of(verdict, pod, self._node, wall - (now - self._since[key]), wall)
                yield _Due(key, pod, event)

    def _write(self, due: Iterable[_Due]) -> None:
        """Write Events until one fails; the others are due again after a pause."""
        for each in due:
            self._tried_at.append(self._clock())
            try:
                created = self._cluster.create_event(each.pod.namespace, each.event)
            except ClusterError as error:
                self.counts.events["failed"] += 1
                self._delay = min(MAX_DELAY_S, self._delay * 2 or FIRST_DELAY_S)
                self._not_before = self._clock() + self._delay
                if self.health.failed():
                    log.warning(
                        "no Event is written on pod %s/%s: %s", each.pod.namespace, each.pod.name, error
                    )
                return
            self.counts.events[created.value] += 1
            self._written.add(each.key)
            self._delay = 0.0
            self.health.succeeded(self._wall())


def _subject(verdict: Verdict, ranks: Sequence[Rank]) -> Rank:
    """Return the rank whose pod a verdict is written on: the one that it names, else the first one here."""
    named = [rank for rank in ranks if rank.identity.rank == verdict.rank]
    return named[0] if named else min(ranks, key=lambda rank: rank.identity.rank)


def event_of(
    verdict: Verdict, pod: Pod, node: str, began_unix_seconds: float, now_unix_seconds: float
) -> dict[str, Any]:
    """Return the Event on a verdict, as the API server takes it.

    Args:
        node: Its source.
        began_unix_seconds: Since when the verdict stands.
    """
    about = "\0".join((pod.uid, verdict.run, verdict.cause.value, str(verdict.rank)))
    digest = hashlib.sha256(about.encode()).hexdigest()[:16]
    text = f"run {verdict.run}: {verdict.summary}; torchperfd explain {verdict.cause.slug}"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{pod.name[:_MAX_POD_NAME].rstrip('.-')}.torchperfd-{digest}",
            "namespace": pod.namespace,
        },
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": pod.namespace,
            "name": pod.name,
            "uid": pod.uid,
        },
        "type": "Warning",
        "reason": "".join(word.capitalize() for word in verdict.cause.slug.split("-")),
        "message": one_line(text, _MAX_MESSAGE),
        "firstTimestamp": _moment(began_unix_seconds),
        "lastTimestamp": _moment(now_unix_seconds),
        "count": 1,
        "source": {"component": "torchperfd", "host": node},
    }


def _moment(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
