"""What it costs to watch a thousand ranks: processor time per window of ten seconds, and memory per rank.

    python -m benchmarks.accuracy.scale [--ranks N] [--memory-ranks N] [--seconds S]

The noise of every rank's phases is that of a real loop's recorded steps, from a place of its own. Such a loop
is now and then slow for seconds, so that in a job of a thousand some are late at any time: the costlier case,
since where all are alike no further check runs. Each second all ranks report and the observer samples.
Counted is what that takes the observer's thread, and what one rank more costs in memory (store and observer
together, by tracemalloc) once the history is full. Exits 1 if any window takes a second, if a rank takes
40 KiB, or if memory is not linear.
"""

import argparse
import gc
import statistics
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterable
from typing import Final, Literal

import numpy as np
from benchmarks.accuracy.noise import recorded
from benchmarks.accuracy.streams import Change, Job
from benchmarks.judge import exit_code

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.observer.observer import Observer
from torchperfd_daemon.stacks.model import RankStacks
from torchperfd_daemon.store.model import HISTORY_STEPS
from torchperfd_daemon.store.store import Rank, Store

RANKS: Final = 1024
WINDOW_S: Final = 10
WINDOWS: Final = 7
IDLE: Final = 0.001
MEASURED: Final[dict[str, Literal["gauge", "counter"]]] = {
    "process_run_delay_seconds": "counter",
    "process_resident_memory_bytes": "gauge",
}
SETTLING_S: Final = 15
FILLING_S: Final = 110
MAX_CPU_S: Final = 1.0
MAX_BYTES: Final = 40 * 1024
LINEAR: Final = 0.1
SEED: Final = 7


class Watched:
    """A job and its observer, on the job's clock."""

    def __init__(self, ranks: int, noise: "np.random.Generator") -> None:
        self.store = Store(clock=lambda: 0.0)
        self.job = Job(self.store, ranks, noise, recording=recorded("computing")[0])
        self.observer = Observer(
            self.store,
            _nobody,
            self._families,
            clock=lambda: self.job.seconds,
            wall=lambda: self.job.wall,
        )

    def train(self, seconds: int, change: Change = lambda _rank, _step: {}) -> float:
        """Train so many seconds; return the processor time that the observer took."""
        spent = 0.0
        for _ in range(seconds):
            self.job.train(1.0, change)
            began = time.thread_time()
            self.observer.sample()
            spent += time.thread_time() - began
        return spent

    def _families(self) -> list[Family]:
        """Return the values of the process collector."""
        keys = [(rank.identity.run, str(rank.identity.rank)) for rank in self.job.ranks]
        return [
            Family(name, "", kind, ("run", "rank"), [(key, self.job.seconds * IDLE) for key in keys])
            for name, kind in MEASURED.items()
        ]


async def _nobody(_ranks: Iterable[Rank], _seconds: float, /) -> AsyncIterator[RankStacks]:
    return
    yield


def bytes_per_rank(ranks: int) -> float:
    """Return what store and observer hold for each of so many ranks."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    watched = Watched(ranks, np.random.default_rng(SEED))
    watched.train(FILLING_S)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(next(watched.store.ranks()).history) == HISTORY_STEPS
    return held / ranks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--memory-ranks", type=int, default=64, help="at most, for memory")
    parser.add_argument("--seconds", type=int, default=SETTLING_S, help="to settle, before it is measured")
    options = parser.parse_args()
    watched = Watched(options.ranks, np.random.default_rng(SEED))
    watched.train(options.seconds)
    healthy = [watched.train(WINDOW_S) for _ in range(WINDOWS)]
    verdicts = [watched.observer.verdict("streamed")]
    culprit = options.ranks // 3
    late: Change = lambda rank, _step: {"forward": 0.5} if rank == culprit else {}  # noqa: E731
    watched.train(WINDOW_S, late)
    slow = [watched.train(WINDOW_S, late) for _ in range(WINDOWS)]
    verdicts.append(watched.observer.verdict("streamed"))
    for words, spent, verdict in zip(
        ("as recorded", "one slow rank"), (healthy, slow), verdicts, strict=True
    ):
        summary = verdict.summary if verdict else "no verdict"
        print(
            f"{options.ranks} ranks, {words:<14} {statistics.median(spent):.3f} s of CPU in {WINDOW_S} s,"
            f" the median of {WINDOWS} ({min(spent):.3f} to {max(spent):.3f}); {summary}",
            flush=True,
        )
    del watched
    counts = [options.memory_ranks // 4, options.memory_ranks // 2, options.memory_ranks]
    held = [bytes_per_rank(count) for count in counts]
    for count, each in zip(counts, held, strict=True):
        print(f"{count:>5} ranks: {each / 1024:5.1f} KiB a rank", flush=True)
    wrong = []
    longest = max(*healthy, *slow)
    if longest > MAX_CPU_S:
        wrong.append(f"a window takes {longest:.2f} s")
    # The run's own detectors are there once: what a rank more costs is the slope.
    slope = (held[2] * counts[2] - held[1] * counts[1]) / (counts[2] - counts[1])
    first = (held[1] * counts[1] - held[0] * counts[0]) / (counts[1] - counts[0])
    print(f"one rank more: {slope / 1024:.1f} KiB")
    if slope > MAX_BYTES:
        wrong.append(f"a rank takes {slope / 1024:.1f} KiB")
    if abs(slope / first - 1) > LINEAR:
        wrong.append(f"memory is not linear: {first / 1024:.1f} KiB a rank, then {slope / 1024:.1f}")
    return exit_code(wrong)


if __name__ == "__main__":
    sys.exit(main())
