"""By how much attaching lengthens settled steps, and what the first steps after an attach cost.

    python -m benchmarks.overhead.settled
    python -m benchmarks.overhead.settled --ranks 1 --only "10 ms" --rounds 12

Two ranks of DistributedDataParallel on gloo (or one process without it), each pinned to a CPU of its own,
without a daemon. A round has six blocks of steps: bare, placebo, attached, attached, placebo, bare, so that
a linear drift of the machine cancels out. The placebo pauses as long as an attach takes. All ranks attach
and detach at the same step. The first steps of a block are left out: they are the transient, which is printed
by itself, beside bare steps at the same places.
Exits 1 when the settled step is longer than its limit allows.
"""

import argparse
import gc
import itertools
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from benchmarks.judge import Figure, exit_code, missed
from benchmarks.overhead.workload import Workload
from torch.nn.parallel import DistributedDataParallel

import torchperfd
from torchperfd.client import Client

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

BARE: Final = "bare"
PLACEBO: Final = "placebo"
ATTACHED: Final = "attached"
ROUND: Final = (BARE, PLACEBO, ATTACHED, ATTACHED, PLACEBO, BARE)
TRANSIENT_EDGES: Final = (0, 10, 30, 100, 200, 400)
"""Steps after the switch between which the transient is printed."""
_UNTOUCHED_BACKWARD: Final = torch.autograd.backward


@dataclass(frozen=True, slots=True)
class Length:
    """How steps of one length are measured.

    Attributes:
        name: For the table.
        limits: By which part the settled step may be longer, in one process and in two ranks.
        width: Of the model's hidden layers, which determines how long a step takes.
        settling_steps: Left out after each switch.
        block_steps: Timed in each block.
        rounds: Of six blocks each; one more goes ahead and is not counted.
    """

    name: str
    limits: tuple[float, float]
    width: int
    settling_steps: int
    block_steps: int
    rounds: int


LENGTHS: Final = (
    Length("1 ms", (0.02, 0.02), 128, 400, 1600, 8),
    Length("10 ms", (0.002, 0.005), 1024, 200, 600, 6),
    Length("100 ms", (0.002, 0.005), 3600, 30, 80, 4),
)

Blocks = Mapping[str, list[list[int]]]
"""The wall times of all steps in nanoseconds, block by block, for each way."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--ranks", type=int, choices=(1, 2), default=2, help="1: without DistributedDataParallel"
    )
    parser.add_argument("--only", help="only the steps of this length, such as '10 ms'")
    parser.add_argument("--rounds", type=int, help="rounds, instead of each length's own number")
    options = parser.parse_args()
    lengths = [length for length in LENGTHS if options.only in {None, length.name}]
    return exit_code(missed(compare_settled(options.ranks, lengths, options.rounds)))


def compare_settled(
    ranks: int, lengths: Iterable[Length] = LENGTHS, rounds: int | None = None
) -> list[Figure]:
    """Measure and print how settled steps change; return a figure for each length."""
    figures = []
    print(f"{'':<8} {'':<9} {'step':>10} {'mean':>8} {'± s.e.':>8} {'p50':>8}  by steps after the switch")
    for length in lengths:
        blocks = _measure(length, ranks, rounds or length.rounds)
        bare = statistics.median(itertools.chain.from_iterable(blocks[BARE])) / 1e6
        for way in (PLACEBO, ATTACHED):
            changes = list(_changes(blocks, way, length.settling_steps, statistics.fmean))
            mean, error = statistics.fmean(changes), statistics.stdev(changes) / math.sqrt(len(changes))
            median = statistics.fmean(_changes(blocks, way, length.settling_steps, statistics.median))
            row = f"{length.name:<8} {way:<9} {bare:>7.2f} ms {mean:>+8.2%} {error:>8.2%} {median:>+8.2%}"
            print(f"{row}  {', '.join(_transient(blocks, way, length.settling_steps))}", flush=True)
        limit = length.limits[ranks - 1]
        figures.append(Figure(f"settled step of {length.name}, {ranks} ranks", mean, "{:+.2%}", most=limit))
    print(f"mean, p50: of settled blocks, beside bare ones; s.e. over rounds. torch {torch.__version__}")
    return figures


def _changes(
    blocks: Blocks, way: str, settling: int, middle: Callable[[list[int]], float]
) -> Iterator[float]:
    """By which part the settled steps were longer than the bare ones, for each round but the first."""

    def of_rounds(name: str) -> list[float]:
        middles = [middle(block[settling:]) for block in blocks[name]]
        return [(first + second) / 2 for first, second in zip(middles[::2], middles[1::2], strict=True)]

    yield from (on / off - 1 for on, off in zip(of_rounds(way)[1:], of_rounds(BARE)[1:], strict=True))


def _transient(blocks: Blocks, way: str, settling: int) -> Iterator[str]:
    """By how much steps soon after the switch are longer than bare ones at the same places, in µs."""
    for begin, end in itertools.pairwise(TRANSIENT_EDGES):
        if end <= settling:
            on, off = (
                statistics.median(statistics.fmean(block[begin:end]) for block in blocks[name][2:])
                for name in (way, BARE)
            )
            yield f"{begin}-{end}: {(on - off) / 1e3:+.0f} µs"


def _measure(length: Length, ranks: int, rounds: int) -> Blocks:
    """Have processes train, and return the times of the first."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    cpus = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(
                target=_train, args=(rank, ranks, cpus[rank % len(cpus)], store, length, rounds, theirs)
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        theirs.close()
        try:
            blocks: Blocks = ours.recv()
        finally:
            for process in processes:
                process.join(30)
                process.kill()
    return blocks


def _attach() -> tuple[Client, float]:
    """Attach, and return the client with the seconds that it took."""
    began = time.monotonic()
    client = torchperfd.attach(job="settled")
    return client, time.monotonic() - began


def _detach(client: Client, steps: int) -> None:
    """Detach; raises RuntimeError if the client saw fewer steps than there were, or left a hook behind."""
    seen = client.report().to_dict()["train"]
    client.detach()
    if seen["steps"] < steps:
        raise RuntimeError(
            f"torchperfd saw {seen['steps']} of {steps} steps, phases {sorted(seen['phases'])}"
        )
    if torch.autograd.backward is not _UNTOUCHED_BACKWARD:
        raise RuntimeError("torchperfd left a hook behind")


def _train(
    rank: int,
    ranks: int,
    cpu: int,
    store: str,
    length: Length,
    rounds: int,
    results: "Connection[Blocks, Blocks]",
) -> None:
    """Train as one rank, and send the times if it is the first."""
    os.sched_setaffinity(0, {cpu})
    os.environ["TORCHPERFD_SOCKET"] = str(Path(store).with_name("no-daemon.sock"))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    workload = Workload(length.settling_steps + length.block_steps, width=length.width)
    if ranks > 1:
        workload.model = DistributedDataParallel(workload.model)
    blocks: dict[str, list[list[int]]] = {BARE: [], PLACEBO: [], ATTACHED: []}
    attach_seconds = 0.1
    for way in ROUND * (rounds + 1):
        gc.collect()
        client = None
        if way == ATTACHED:
            client, attach_seconds = _attach()
        elif way == PLACEBO:
            time.sleep(attach_seconds)
        dist.barrier()
        workload.ends.clear()
        workload.plain(workload.loader)
        if client is not None:
            _detach(client, len(workload.ends) - 1)
        ends = [wall for _, wall in workload.ends]
        blocks[way].append([after - before for before, after in itertools.pairwise(ends)])
    if rank == 0:
        results.send(blocks)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
