"""Sends what the metrics page shows over OTLP, at its own interval.

    the loop            every interval: read the page, unless the thread is still busy
    the sender's thread encode, send, and retry until the next interval; then the message is dropped

There is one message at a time. A dead or slow endpoint costs messages, which are counted, and nothing else.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client.core import Metric

from torchperfd_daemon.background import WorkerHealth
from torchperfd_daemon.push.otlp_messages import encode
from torchperfd_daemon.push.otlp_transport import Answer, Result, Transport
from torchperfd_daemon.push.sender import ExportCounts, Sender

FIRST_DELAY_S: Final = 1.0
MAX_DELAY_S: Final = 30.0
MAX_RETRY_AFTER_S: Final = 3600.0
"""However long the endpoint asks not to be asked again."""
_JITTER: Final = 0.5

log = logging.getLogger("torchperfd.otlp")


class OtlpExporter:
    """Sends metrics, until it is closed.

    Args:
        send: Makes one attempt.
        resource: Attributes of this daemon.
        interval_seconds: From one message to the next.
        url: For the log.
        wait: Waits some seconds before another attempt; returns whether the daemon ends.
        chance: A random number below 1, for the jitter of retries.
    """

    def __init__(
        self,
        send: Transport,
        resource: Mapping[str, str],
        interval_seconds: float,
        url: str,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        wait: Callable[[float], bool] | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._send = send
        self._resource = resource
        self._interval = interval_seconds
        self._url = url
        self._clock = clock
        self._wall = wall
        self._sender = Sender("otlp")
        self._wait = wait or self._sender.wait
        self._chance = chance
        self._not_before = 0.0
        self.counts = ExportCounts()
        self.health = WorkerHealth("otlp", period_seconds=interval_seconds)

    async def run(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Export every interval until cancelled.

        Args:
            collect: Reads the metrics page; called on this loop, like a scrape.
        """
        while True:
            await asyncio.sleep(self._interval)
            try:
                self.export(collect)
            except Exception:
                if self.health.failed():
                    log.exception("metrics cannot be read for %s", self._url)

    def export(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Read the page once and have it sent, unless the message before is on its way or it is too early."""
        if self._sender.is_busy or self._clock() < self._not_before:
            self.counts.messages["skipped"] += 1
            return
        metrics, now_ns = list(collect()), int(self._wall() * 1e9)
        self._sender.start(lambda: self._deliver(metrics, now_ns))

    def close(self) -> None:
        """End the thread; one whose endpoint hangs is left behind after a second."""
        self._sender.close()

    def _deliver(self, metrics: list[Metric], now_ns: int) -> None:
        try:
            body, points = encode(metrics, self._resource, now_ns)
            self._settle(self._attempt(body), points)
        except Exception:
            self.counts.messages["failed"] += 1
            if self.health.failed():
                log.exception("metrics cannot be sent to %s", self._url)

    def _attempt(self, body: bytes) -> Answer:
        """Send a message, again where that may help before the next one is due; return the last answer."""
        until, delay = self._clock() + self._interval, FIRST_DELAY_S
        while True:
            answer = self._send(body)
            if answer.result is not Result.RETRY:
                return answer
            # An endpoint that asks for no time at all is not asked without end.
            pause = delay * (1 - _JITTER * self._chance())
            delay = min(MAX_DELAY_S, 2 * delay)
            if answer.retry_after_seconds is not None:
                pause = max(pause, min(MAX_RETRY_AFTER_S, answer.retry_after_seconds))
                self._not_before = self._clock() + pause
            if self._clock() + pause >= until or self._wait(pause):
                return answer

    def _settle(self, answer: Answer, points: int) -> None:
        counts = self.counts
        if answer.result is Result.SENT:
            rejected = min(answer.rejected, points)
            counts.messages["sent"] += 1
            counts.points["sent"] += points - rejected
            counts.points["rejected"] += rejected
            counts.last_success_unix_seconds = self._wall()
            if self.health.is_failing:
                log.info("metrics are sent to %s again", self._url)
            if not answer.problem:
                self.health.succeeded(self._wall())
            elif self.health.failed():
                log.warning("%s took the metrics: %s", self._url, answer.problem)
            return
        counts.messages["refused" if answer.result is Result.REFUSED else "failed"] += 1
        counts.points["dropped"] += points
        if self.health.failed():
            log.warning(
                "metrics cannot be sent to %s: %s; dropped until that works", self._url, answer.problem
            )
