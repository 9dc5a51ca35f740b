"""What open pages cost the daemon: ``python -m benchmarks.page.daemon [--seconds 30]``.

A daemon with eight ranks of ten steps a second is watched without a page and with three, which follow a run's
events and read its documents as often as the page's view of a run does; then without again, since the machine
changes. Printed are cores and memory. Exits 1 when three pages take more than 1 % of a core.
"""

import argparse
import contextlib
import http.client
import sys
import threading
import time
from collections.abc import Iterator
from typing import Final

from benchmarks.daemon.__main__ import REPORTS_PER_SECOND, SETTLE_S, STEPS_PER_SECOND, daemon, pid_of, ranks
from benchmarks.daemon.rank import WORLD
from benchmarks.daemon.watch import MIB, watch
from tests.support.node import Node

PAGES: Final = 3
MAX_CORES: Final = 0.01

# Seconds between two reads of each document, as in assets/feed.js.
_READ_EVERY_S: Final = {
    "/api/v1/runs/bench": 6.0,
    "/api/v1/runs/bench/ranks": 5.0,
    "/api/v1/captures?run=bench&limit=20": 15.0,
}
_TICK_S: Final = 0.1


class Page:
    """As much of a page as the daemon sees."""

    def __init__(self, node: Node) -> None:
        self._port = node.metrics_port
        self._stop = threading.Event()
        self.stream_bytes = 0
        self.document_bytes = 0
        self._threads = [threading.Thread(target=each) for each in (self._listen, self._read)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)

    def _listen(self) -> None:
        connection = self._connect()
        connection.request("GET", "/api/v1/runs/bench/history", headers={"accept-encoding": "gzip"})
        connection.getresponse().read()
        connection.request("GET", "/api/v1/events?run=bench")
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        while not self._stop.is_set():
            self.stream_bytes += len(answer.readline())
        connection.close()

    def _read(self) -> None:
        connection = self._connect()
        due = dict.fromkeys(_READ_EVERY_S, 0.0)
        while not self._stop.wait(_TICK_S):
            for path, at in due.items():
                if time.monotonic() >= at:
                    due[path] = time.monotonic() + _READ_EVERY_S[path]
                    connection.request("GET", path, headers={"accept-encoding": "gzip"})
                    answer = connection.getresponse()
                    assert answer.status == 200, answer.read()
                    self.document_bytes += len(answer.read())
        connection.close()


@contextlib.contextmanager
def opened(node: Node, count: int) -> Iterator[list[Page]]:
    """Keep pages open."""
    pages = [Page(node) for _ in range(count)]
    try:
        yield pages
    finally:
        for page in pages:
            page.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="how long each of the three parts is watched"
    )
    seconds: float = parser.parse_args().seconds
    cores: list[float] = []
    with daemon() as node, ranks(node, WORLD, str(STEPS_PER_SECOND), str(REPORTS_PER_SECOND)):
        for count in (0, PAGES, 0):
            with opened(node, count) as pages:
                time.sleep(SETTLE_S)
                before = sum(page.stream_bytes + page.document_bytes for page in pages)
                cost = watch(pid_of(node), seconds)
                sent = sum(page.stream_bytes + page.document_bytes for page in pages) - before
            cores.append(cost.cores)
            print(
                f"{count} pages, {cost.seconds:.0f} s: {cost.cores:.2%} of a core,"
                f" {cost.peak_bytes / MIB:.1f} MiB, {sent / cost.seconds / 1e3:.1f} kB/s"
            )
    more = cores[1] - (cores[0] + cores[2]) / 2
    print(f"{PAGES} pages take {more:.2%} of a core more, limit {MAX_CORES:.0%}")
    return 1 if more > MAX_CORES else 0


if __name__ == "__main__":
    sys.exit(main())
