"""How long reading the history holds the loop: ``python -m benchmarks.page.history [--ranks 512]``.

A run of many ranks with ten minutes of seconds and 256 steps each is read over the daemon's HTTP interface,
in this process, while another task of the same loop measures how long it had to wait. Printed are how long
the answers took and the longest wait of each, for all ranks, as a page asks first, and for 64 that it draws:
the median over the reads, the least, which the rest of the machine disturbs least, and the CPU time of the
loop's thread in it. The limit of the least wait is 20 ms; exits 1 beyond it.
"""

import argparse
import asyncio
import statistics
import sys
import time
from array import array
from contextlib import suppress
from typing import Final

from starlette.types import ASGIApp, Message
from tests.support.served import serving, short_directory

from torchperfd_daemon.metrics.page import MetricsPage
from torchperfd_daemon.store.model import RankIdentity, StepColumns
from torchperfd_daemon.store.store import Store
from torchperfd_daemon.web.access import PageToken, Parts
from torchperfd_daemon.web.api import Api
from torchperfd_daemon.web.app import build_app
from torchperfd_daemon.web.endpoint import AnswerCache

LIMIT_S: Final = 0.02
ROUNDS: Final = 7
SECONDS: Final = 600
_STEP_NS: Final = 250_000_000
_PHASES: Final = ("data", "h2d", "forward", "loss", "backward", "optimizer", "zero_grad", "collective_wait")


def fill(store: Store, ranks: int) -> None:
    """Add a run that has trained for ten minutes."""
    count = SECONDS * 10**9 // _STEP_NS
    newest = time.time_ns()
    ends = array("q", [newest - (count - 1 - step) * _STEP_NS for step in range(count)])
    for rank in range(ranks):
        # No two numbers alike: they have all their digits in the answer.
        durations = array("q", [_STEP_NS - 1_000_003 * (step * 7919 % 97) - rank for step in range(count)])
        phases = {name: array("q", [value // len(_PHASES) for value in durations]) for name in _PHASES}
        record = store.join(RankIdentity("bench", rank, ranks, rank, node="node-a", pid=1 + rank))
        store.add_steps(record, StepColumns(ends, durations, phases))


class Waits:
    """Measures how long other tasks hold the running loop."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.longest_cpu = 0.0

    async def measure(self) -> None:
        while True:
            began, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0)
            self.longest = max(self.longest, time.perf_counter() - began)
            self.longest_cpu = max(self.longest_cpu, time.thread_time() - cpu)


async def read(app: ASGIApp, path: str, query: str) -> tuple[float, float, float]:
    """Return the seconds of an answer, of the longest wait meanwhile, and of CPU time in a wait at most."""
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(b"host", b"localhost"), (b"accept-encoding", b"gzip")],
    }
    statuses: list[int] = []

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        # Not unpacked: that is a client's work, on another loop.
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    waits = Waits()
    measuring = asyncio.create_task(waits.measure())
    await asyncio.sleep(0)
    began = time.perf_counter()
    await app(scope, receive, send)
    took = time.perf_counter() - began
    measuring.cancel()
    with suppress(asyncio.CancelledError):
        await measuring
    assert statuses == [200], statuses
    return took, waits.longest, waits.longest_cpu


async def measure(ranks: int) -> bool:
    """Print the figures; return whether they are within the limit."""
    chosen = ",".join(str(rank) for rank in range(0, ranks, max(1, ranks // 64)))
    row = "{:<22} {:>12} {:>14} {:>10} {:>10}"
    print(row.format("", "answer, ms", "loop held, ms", "least, ms", "CPU, ms"))
    good = True
    with short_directory() as directory:
        async with serving(directory) as served:
            fill(served.store, ranks)
            parts = Parts(
                served.store, served.control, served.catalog, served.coordinator, node="node-a", instance="i1"
            )
            api = Api(parts, PageToken(), cache=AnswerCache(0.0))
            app = build_app(MetricsPage([]), lambda: True, routes=api.routes())
            for name, query in (("history", ""), ("history of 64 ranks", f"ranks={chosen}")):
                found = [await read(app, "/api/v1/runs/bench/history", query) for _ in range(ROUNDS)]
                answers, waits, cpu = zip(*found, strict=True)
                good = good and min(waits) <= LIMIT_S
                figures = (
                    statistics.median(answers),
                    statistics.median(waits),
                    min(waits),
                    statistics.median(cpu),
                )
                print(row.format(name, *(f"{1000 * value:.1f}" for value in figures)))
            await api.close()
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=512)
    ranks: int = parser.parse_args().ranks
    print(f"{ranks} ranks on one daemon; the limit of the least is {1000 * LIMIT_S:.0f} ms")
    return 0 if asyncio.run(measure(ranks)) else 1


if __name__ == "__main__":
    sys.exit(main())
