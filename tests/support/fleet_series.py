"""Simulated jobs on many nodes: each node has its own store and observer, its metrics page, and its survey.

Pages are made by the daemon's own code. So are the verdicts of daemons that ask each other, to which the
verdicts from series of these pages are compared.
"""

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.accuracy.streams import Change, Job

from torchperfd.v1 import fleet_pb2
from torchperfd_daemon.diagnosis.verdict import Verdict
from torchperfd_daemon.fleet.translate import judge_all
from torchperfd_daemon.goodput.totals import Bucket
from torchperfd_daemon.metrics.comparison import ComparisonMetrics
from torchperfd_daemon.metrics.page import MetricsPage, goodput_metrics
from torchperfd_daemon.metrics.training import DiagnosisMetrics, TrainingMetrics
from torchperfd_daemon.observer.observer import Observer
from torchperfd_daemon.service.node_survey import survey
from torchperfd_daemon.stacks.model import Frame, Outcome, RankStacks, Thread
from torchperfd_daemon.store.model import RankIdentity, StepColumns
from torchperfd_daemon.store.store import Rank, Store

PER_NODE = 8


def healthy(rank: int, step: int) -> dict[str, float]:
    """Change nothing."""
    return {}


def one_slow_rank(rank: int, step: int) -> dict[str, float]:
    """Let the forward of one rank take longer."""
    return {"forward": 0.03} if rank == 5 else {}


def slow_node(rank: int, step: int) -> dict[str, float]:
    """Let all ranks of one node compute longer: none of them is slow by its own daemon's lights."""
    return {"backward": 0.025} if rank < PER_NODE else {}


def input_bound(rank: int, step: int) -> dict[str, float]:
    """Let all ranks wait for data."""
    return {"data": 0.06}


def starved_rank(rank: int, step: int) -> dict[str, float]:
    """Let one rank wait for data."""
    return {"data": 0.05} if rank == 3 else {}


CASES: dict[str, Change] = {
    "healthy": healthy,
    "slow-rank": one_slow_rank,
    "slow-node": slow_node,
    "input-bound": input_bound,
    "starved-rank": starved_rank,
}


class _Nodes(Store):
    """Hands each rank to the store of its node.

    Args:
        world: The number of ranks that the run is said to have.
    """

    def __init__(self, stores: Sequence[Store], world: int) -> None:
        super().__init__()
        self._stores = stores
        self._world = world
        self._store_of: dict[Rank, Store] = {}

    def join(self, identity: RankIdentity, *_: Any, **__: Any) -> Rank:
        """Let a rank join on its node."""
        place = identity.rank // PER_NODE
        named = replace(
            identity,
            node=f"{identity.run}-{place}",
            world_size=self._world,
            local_rank=identity.rank % PER_NODE,
            job_name=f"job-{identity.run}",
        )
        rank = self._stores[place].join(named)
        self._store_of[rank] = self._stores[place]
        return rank

    def add_steps(self, rank: Rank, steps: StepColumns) -> None:
        """Add steps on the rank's node."""
        self._store_of[rank].add_steps(rank, steps)


class _LiveJob(Job):
    """A job whose steps end about now."""

    began = 0.0

    @property
    def wall(self) -> float:
        """Unix seconds of the job's clock."""
        return self.began + self.seconds


_REDUCE = (
    Frame("/x/site-packages/torch/distributed/distributed_c10d.py", 3000, "all_reduce"),
    Frame("/s/train.py", 22, "sync"),
)
_COMPUTE = (Frame("/s/train.py", 31, "compute"),)


class SimulatedRun:
    """One run on several nodes, from its start.

    Args:
        ranks: How many are simulated, 8 on each node.
        world: How many the run is said to have; more than ``ranks`` where nodes are to be copied.
    """

    def __init__(
        self,
        run: str,
        ranks: int,
        change: Change = healthy,
        world: int = 0,
        *,
        seconds: int = 40,
        **options: Any,
    ) -> None:
        self.run = run
        self.change = change
        self._stores = [Store(most=10**6, most_per_user=10**6) for _ in range(ranks // PER_NODE)]
        self.job = _LiveJob(
            _Nodes(self._stores, world or ranks), ranks, np.random.default_rng(11), run=run, **options
        )
        self.job.began = time.time() - seconds
        self._observers = [
            Observer(store, self._stacks, clock=lambda: self.job.seconds, wall=lambda: self.job.wall)
            for store in self._stores
        ]
        self._pages = [
            MetricsPage(
                [
                    TrainingMetrics(store).families,
                    DiagnosisMetrics(store, observer).families,
                    ComparisonMetrics(store, observer).families,
                    lambda store=store: goodput_metrics(lambda: self._goodput(store)),  # type: ignore[misc]
                ]
            )
            for store, observer in zip(self._stores, self._observers, strict=True)
        ]
        self.train(seconds)

    def train(self, seconds: int) -> None:
        """Train on, and let the observers of all nodes sample each second."""
        for _ in range(seconds):
            self.job.train(1.0, self.change)
            for observer in self._observers:
                observer.sample()

    def hang(self, seconds: int) -> None:
        """Let time go by without a step, while all ranks wait in a collective for rank 1."""
        for _ in range(seconds):
            self.job.seconds += 1
            for observer in self._observers:
                for run in observer.sample():
                    asyncio.run(observer.read_stacks(run))

    async def _stacks(self, ranks: Iterable[Rank], seconds: float, /) -> AsyncIterator[RankStacks]:
        for rank in ranks:
            number = rank.identity.rank
            thread = Thread(1, "MainThread", True, False, _COMPUTE if number == 1 else _REDUCE)
            yield RankStacks(
                number,
                rank.identity.world_size,
                rank.identity.node,
                rank.identity.pid,
                Outcome.ANSWERED,
                threads=(thread,),
                step=50,
                seconds_since_step=11.0,
            )

    def pages(self) -> list[bytes]:
        """Return the metrics page of each node."""
        return [page.render("")[0] for page in self._pages]

    def verdict(self, nodes: int = 0) -> Verdict:
        """Return the verdict of daemons that ask each other.

        Args:
            nodes: How many there are, as :func:`copied` makes them; 0 for those that are simulated.
        """
        surveys = self._surveys()
        for number in range(len(surveys), nodes):
            copy = fleet_pb2.NodeSurvey()
            copy.CopyFrom(surveys[origin(number, len(self._stores))])
            copy.node = f"{self.run}-{number}"
            for rank in copy.ranks:
                identity = rank.status.identity
                identity.rank = PER_NODE * number + identity.rank % PER_NODE
                identity.node = copy.node
            surveys.append(copy)
        [verdict] = judge_all(surveys)
        return verdict

    def _surveys(self) -> list[fleet_pb2.NodeSurvey]:
        surveys = []
        for number, (store, observer) in enumerate(zip(self._stores, self._observers, strict=True)):
            asked = fleet_pb2.NodeSurveyRequest(verdicts=True)
            found = survey(store, observer.verdict, observer.device_work, asked)
            found.node = f"{self.run}-{number}"
            surveys.append(found)
        return surveys

    def _goodput(self, store: Store) -> dict[str, dict[Bucket, float]]:
        seconds = dict.fromkeys(Bucket, 0.0)
        seconds[Bucket.PRODUCTIVE] = 0.9 * self.job.seconds * PER_NODE
        seconds[Bucket.START_UP] = 0.1 * self.job.seconds * PER_NODE
        return {self.run: seconds}


def origin(node: int, simulated: int) -> int:
    """Return the simulated node of which a node is a copy; the first one, that of the faults, has none."""
    return node if node < simulated else 1 + node % (simulated - 1)


_NUMBER = re.compile(rb'rank="(\d+)"')


def copied(page: bytes, run: str, node: int) -> bytes:
    """Return the page of another node of a run, with ranks of its own."""
    page = re.sub(rb'node="[^"]*"', b'node="%s-%d"' % (run.encode(), node), page)
    first = PER_NODE * node
    return _NUMBER.sub(lambda match: b'rank="%d"' % (first + int(match[1]) % PER_NODE), page)


class PageServer(ThreadingHTTPServer):
    """Serves the metrics pages of many nodes, each at a path of its own.

    Attributes:
        pages: By path; replaced as a whole.
    """

    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _PageHandler)
        self.pages: Mapping[str, bytes] = {}


class _PageHandler(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        """Send a page."""
        page = self.server.pages.get(self.path)
        self.send_response(HTTPStatus.NOT_FOUND if page is None else HTTPStatus.OK)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(page or b"")))
        self.end_headers()
        self.wfile.write(page or b"")

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextlib.contextmanager
def serving() -> Iterator[PageServer]:
    """Serve pages for as long as the block lasts."""
    with PageServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def scrape_config(file: Path, server: PageServer, seconds: float, down: str = "") -> None:
    """Write the configuration by which a Prometheus or VictoriaMetrics scrapes each page as a node.

    Args:
        down: An address that does not answer; empty for none.
    """
    port = server.server_address[1]
    targets = [
        f"      - {{targets: ['127.0.0.1:{port}'],"
        f" labels: {{instance: '{path[1:]}:9407', __metrics_path__: '{path}'}}}}"
        for path in server.pages
    ]
    targets += [f"      - {{targets: ['{down}']}}"] if down else []
    interval = f"{round(seconds * 1000)}ms"
    file.write_text(
        f"global: {{scrape_interval: {interval}, scrape_timeout: {interval}}}\n"
        "scrape_configs:\n  - job_name: torchperfd\n    static_configs:\n" + "\n".join(targets) + "\n"
    )
