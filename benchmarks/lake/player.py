"""Nodes that write a lake, on a simulated clock, until done or killed.

    python -m benchmarks.lake.player FOLDER FIRST LAST WINDOWS

Plays the nodes FIRST to LAST through so many windows of five minutes with the daemon's journal and sender,
into ``FOLDER/lake``. The store refuses one object in ten, and takes one in ten without a word. A process that
is killed at any moment continues when it is started again: the window that comes next is a mark in the
journal, which changes together with the rows.
"""

import asyncio
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from torchperfd.v1.contract import PHASES
from torchperfd_daemon.captures.destination import Destination, UploadError
from torchperfd_daemon.goodput.totals import Bucket
from torchperfd_daemon.lake.journal import Journal, Marked
from torchperfd_daemon.lake.rows import SPAN_S, Named
from torchperfd_daemon.lake.sender import send
from torchperfd_daemon.lake.tables import PARQUET
from torchperfd_daemon.lake.uploader import WINDOW_S

RANKS: Final = 8
MIDNIGHT: Final = 20_600 * 86_400.0
"""When the played time begins; Unix seconds."""
NODES_OF_JOB: Final = 4
HOURLY: Final = int(3600 / WINDOW_S)
WINDOWS_OF_RUN: Final = HOURLY
FAILURES: Final = 0.1

_STEP_S: Final = 0.25
_BLOCKS: Final = 192
_PHASES_OF_RUN: Final = 7
_CAUSES: Final = ("input-bound", "slow rank", "none", "checkpoint", "garbage collection")
_JOURNALS: Final = "journals"


class UnreliableStore(Destination):
    """A folder that refuses some objects, and takes some without an answer."""

    def __init__(self, folder: Path, failures: float, chance: random.Random) -> None:
        super().__init__(folder.as_uri())
        self._failures = failures
        self._chance = chance

    async def put(self, key: str, file: BinaryIO, size: int, sha256: str) -> int:
        if self._chance.random() < self._failures:
            raise UploadError("refused")
        sent = await super().put(key, file, size, sha256)
        if self._chance.random() < self._failures:
            raise UploadError("no answer")
        return sent


def node_name(number: int) -> str:
    return f"node{number:04d}"


def rows_of_window(number: int, window: int) -> Iterator[Named]:
    """Yield what a node records in five minutes, which is the same each time."""
    since = MIDNIGHT + window * WINDOW_S
    job = number // NODES_OF_JOB
    run = f"job{job:03d}-{window // WINDOWS_OF_RUN}"
    source = {"node": node_name(number), "run": run, "job": f"job{job:03d}", "owner": f"team{job % 7}"}
    steps = int(SPAN_S / _STEP_S)
    phases = {f"{phase}_seconds": round(SPAN_S / len(PHASES), 6) for phase in PHASES}
    for rank in range(number * RANKS, (number + 1) * RANKS):
        row = {**source, "rank": rank, "steps": steps, "seconds": float(SPAN_S), **phases}
        for start in range(int(since), int(since + WINDOW_S), SPAN_S):
            longest = _STEP_S * (1 + (start * 7 + rank) % 97 / 100)
            yield "steps", {**row, "time_unix_seconds": float(start), "longest_seconds": longest}
    if (window + 1) % HOURLY == 0:
        yield from _hourly(source, number, since + WINDOW_S)
    if (window + 1) % WINDOWS_OF_RUN == 0:
        yield _run(source, window, since + WINDOW_S)


def _hourly(source: dict[str, Any], number: int, until: float) -> Iterator[Named]:
    span = {"since_unix_seconds": until - 3600, "until_unix_seconds": until}
    spent = {f"{bucket.value}_seconds": 0.0 for bucket in Bucket}
    spent |= {"productive_seconds": 3000.0, "data_wait_seconds": 500.0, "stall_seconds": 100.0}
    for rank in range(number * RANKS, (number + 1) * RANKS):
        yield "goodput", {**source, **span, "rank": rank, "gpus": 1, "starts": 1, **spent}
    cause = _CAUSES[number % len(_CAUSES)]
    cost = {"cause": cause, "step_seconds": _STEP_S, "cost_seconds_per_step": 0.05, "saves_seconds": 0.0}
    blamed = {"position": 0, "gpus": RANKS, "culprit_node": node_name(number - number % 3)}
    yield "verdicts", {**source, **span, **cost, **blamed, "lost_seconds": 720.0}


def _run(source: dict[str, Any], window: int, until: float) -> Named:
    played = window // WINDOWS_OF_RUN
    span = {"since_unix_seconds": until - WINDOWS_OF_RUN * WINDOW_S, "until_unix_seconds": until}
    step = _STEP_S * (1.2 if played % 3 == 2 else 1.0)
    found = {"cause": "input-bound", "fix": "num_workers=4", "step_seconds": step, "saves_seconds": step / 5}
    of_job = {"ending": "finished", "ranks": RANKS, "world_size": RANKS * NODES_OF_JOB}
    versions = {"torch_version": f"2.{played}", "python_version": "3.12", "client_version": "1.0"}
    own = {"mean_step_seconds": step, "report": _report(f"{source['node']} {window}", step)}
    return "runs", {**source, **span, **found, **of_job, **versions, **own}


def _report(seed: str, step: float) -> str:
    """Return blocks of steps like those of a long run."""
    chance = random.Random(seed)

    def column(mean: float) -> list[float]:
        return [float(f"{RANKS * mean * chance.gauss(1, 0.02):.7g}") for _ in range(_BLOCKS)]

    phases = {phase: column(step / len(PHASES)) for phase in PHASES[:_PHASES_OF_RUN]}
    blocks = {"ranks": RANKS, "steps": 64, "step_seconds": column(step), "phases": phases}
    return json.dumps({"ranks": [{"rank": 0, "blocks": blocks}]}, separators=(",", ":"))


def record_window(journal: Journal, number: int) -> None:
    """Append the rows of the node's next window, and seal them."""

    def rows(mark: Callable[[str], str | None]) -> Marked:
        window = int(mark("window") or 0)
        return Marked(list(rows_of_window(number, window)), {"window": str(window + 1)})

    now = MIDNIGHT + (next_window(journal) + 1) * WINDOW_S - 1
    journal.append(now, rows)
    journal.seal(now, PARQUET)


def next_window(journal: Journal) -> int:
    """Return the number of the first window that the journal has no rows of."""
    found = 0

    def read(mark: Callable[[str], str | None]) -> Marked:
        nonlocal found
        found = int(mark("window") or 0)
        return Marked()

    journal.append(MIDNIGHT, read)
    return found


async def send_all(journal: Journal, store: Destination) -> bool:
    """Send what waits, as far as the store takes it; return whether that was all."""
    try:
        async for sequence, _ in send(store, "bench", journal):
            journal.sent([sequence])
    except UploadError:
        return False
    return True


def play(folder: Path, first: int, last: int, windows: int, failures: float = FAILURES) -> None:
    """Play nodes, one after the other, through all their windows."""
    store = UnreliableStore(folder / "lake", failures, random.Random())
    with asyncio.Runner() as runner:
        for number in range(first, last):
            journal = Journal(folder / _JOURNALS, node_name(number))
            while next_window(journal) < windows:
                record_window(journal, number)
                runner.run(send_all(journal, store))
            while journal.pending().rows:
                runner.run(send_all(journal, store))
            journal.close()


if __name__ == "__main__":
    play(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
