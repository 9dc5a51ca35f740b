"""By how much attaching lengthens settled steps, and what the first steps after an attach cost.

    python -m benchmarks.overhead.settled
    python -m benchmarks.overhead.settled --only "1 ms" --minutes 10

Two ranks of DistributedDataParallel on gloo (or one process without it), each pinned to a CPU of its own,
without a daemon. In a round all ranks attach and train until steps are settled. Then the hooks go off and on
at the same steps on all ranks, in units of four short blocks; the first steps after each switch are left out.
In a placebo round nothing is attached, and the switch does nothing: its change shows the noise. How the
change is estimated is described in ``estimate.py``. To it is added what the client's threads have of the
rank's CPU, which holds up training at worst for as long; it is measured in steps without a switch. The first
steps after an attach are printed by themselves, beside those after a pause that is as long.
Exits 1 when the settled step is longer than its limit allows.
"""

import argparse
import gc
import itertools
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from benchmarks.judge import Figure, exit_code, missed
from benchmarks.overhead.estimate import Block, Unit, added_cpu_ns, quiet, wall_change
from benchmarks.overhead.switch import Switch
from benchmarks.overhead.workload import Workload, now
from torch.nn.parallel import DistributedDataParallel

import torchperfd
from torchperfd.client import Client

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PLACEBO: Final = "placebo"
ATTACHED: Final = "attached"
ROUNDS: Final = (ATTACHED, PLACEBO, ATTACHED)
_UNTOUCHED_BACKWARD: Final = torch.autograd.backward
_CLIENT_THREADS: Final = "torchperfd"
_STAT: Final = Path("/proc/stat")
_USED: Final = (1, 2, 3, 8)
"""The columns of a CPU in ``/proc/stat``: user, nice, system, stolen. Interrupts may be the job's own."""


@dataclass(frozen=True, slots=True)
class Length:
    """How steps of one length are measured.

    Attributes:
        name: For the table.
        limits: By which part the settled step may be longer, in one process and in two ranks.
        width: Of the model's hidden layers, which determines how long a step takes.
        settling_steps: Left out after attaching.
        even_steps: Without a switch, in which the client's threads are measured: several of their flushes.
        switched_steps: Left out after each switch.
        block_steps: Timed in each block.
        units: In a round.
    """

    name: str
    limits: tuple[float, float]
    width: int
    settling_steps: int
    even_steps: int
    switched_steps: int
    block_steps: int
    units: int


LENGTHS: Final = (
    Length("1 ms", (0.02, 0.02), 128, 400, 4000, 20, 100, 20),
    Length("10 ms", (0.002, 0.005), 1024, 200, 500, 10, 30, 10),
    Length("100 ms", (0.002, 0.005), 3600, 30, 50, 2, 6, 4),
)
MINUTES: Final = 4.0
FIRST_STEPS: Final = 10
"""After an attach: those that it lengthens by far the most."""


@dataclass(slots=True)
class Measured:
    """What a rank has measured.

    Attributes:
        units: By way.
        thread_ns: CPU time of the client's threads in steps without a switch, by their name.
        even_ns: Wall time of these steps.
        first_ns: Mean wall time of the first steps of each round, by way.
    """

    units: dict[str, list[Unit]] = field(default_factory=lambda: {PLACEBO: [], ATTACHED: []})
    thread_ns: dict[str, int] = field(default_factory=dict)
    even_ns: int = 0
    first_ns: dict[str, list[float]] = field(default_factory=lambda: {PLACEBO: [], ATTACHED: []})

    @property
    def background(self) -> float:
        """The part of a step that the client's threads may have held up at worst."""
        return sum(self.thread_ns.values()) / self.even_ns


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--ranks", type=int, choices=(1, 2), default=2, help="1: without DistributedDataParallel"
    )
    parser.add_argument("--only", help="only the steps of this length, such as '10 ms'")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for each length")
    options = parser.parse_args()
    lengths = [length for length in LENGTHS if options.only in {None, length.name}]
    return exit_code(missed(compare_settled(options.ranks, lengths, options.minutes)))


def compare_settled(
    ranks: int, lengths: Iterable[Length] = LENGTHS, minutes: float = MINUTES
) -> list[Figure]:
    """Measure and print how settled steps change; return a figure for each length."""
    figures = []
    print(
        f"{'':<8} {'':<9} {'step':>10} {'wall':>8} {'± s.e.':>8} {'CPU':>9} {'± s.e.':>8} {'units':>6} others"
        f" {'first':>9}"
    )
    for length in lengths:
        each_rank = _measure(length, ranks, minutes)
        for way in (PLACEBO, ATTACHED):
            units = _with_others([measured.units[way] for measured in each_rank])
            off = statistics.median(
                step for unit in units for block in unit if not block.is_on for step in block.wall_ns
            )
            longer = statistics.median(each_rank[0].first_ns[way]) - off
            wall, cpu = wall_change(units), added_cpu_ns(units)
            others = statistics.fmean(block.others for unit in quiet(units) for block in unit)
            print(
                f"{length.name:<8} {way:<9} {off / 1e6:>7.2f} ms {wall.mean:>+8.2%}"
                f" {wall.error:>8.2%} {cpu.mean / 1e3:>+6.1f} µs {cpu.error / 1e3:>5.1f} µs {len(units):>6}"
                f" {others:>7.1%} {longer / 1e6:>+6.2f} ms",
                flush=True,
            )
        background = max(measured.background for measured in each_rank)
        threads = each_rank[0].thread_ns.items()
        named = ", ".join(f"{name} {ns / each_rank[0].even_ns:.2%}" for name, ns in sorted(threads))
        print(f"{length.name:<8} {'threads':<9} {'':>10} {background:>+8.2%}  {named}", flush=True)
        limit = length.limits[ranks - 1]
        name = f"settled step of {length.name}, {ranks} ranks"
        figures.append(Figure(name, wall.mean + background, "{:+.2%}", most=limit))
    print(
        "wall: without the slowest tenth of the steps; CPU: added to a step of the training thread; both of"
        "\nthe half of the units in which others had least of the CPU; first: how much longer each of the"
        f"\nfirst {FIRST_STEPS} steps is after an attach, or after a pause as long. torch {torch.__version__}"
    )
    return figures


def _with_others(each_rank: Sequence[Sequence[Unit]]) -> list[Unit]:
    """Return the first rank's units, each with the most that others had of any rank's CPU: ranks wait."""
    return [
        [
            Block(first.is_on, first.wall_ns, first.cpu_ns, max(block.others for block in (first, *further)))
            for first, *further in zip(*same, strict=True)
        ]
        for same in zip(*each_rank, strict=True)
    ]


def _measure(length: Length, ranks: int, minutes: float) -> list[Measured]:
    """Have processes train; return what each of them has measured."""
    context = multiprocessing.get_context("spawn")
    cpus = sorted(os.sched_getaffinity(0))
    pipes = [context.Pipe() for _ in range(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(
                target=_train,
                args=(rank, ranks, cpus[rank % len(cpus)], store, length, minutes, pipes[rank][1]),
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        try:
            return [ours.recv() for ours, _ in pipes]
        finally:
            for process in processes:
                process.join(30)
                process.kill()


def _train(
    rank: int,
    ranks: int,
    cpu: int,
    store: str,
    length: Length,
    minutes: float,
    results: "Connection[Measured, Measured]",
) -> None:
    """Train as one rank, and send what was measured."""
    os.sched_setaffinity(0, {cpu})
    os.environ["TORCHPERFD_SOCKET"] = str(Path(store).with_name("no-daemon.sock"))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    workload = Workload(length.switched_steps + length.block_steps, width=length.width)
    if ranks > 1:
        workload.model = DistributedDataParallel(workload.model)
    trained = _Rank(cpu, length, workload)
    deadline = time.monotonic() + 60 * minutes
    for way in itertools.cycle(ROUNDS):
        trained.round(way)
        # The ranks agree on the end.
        goes_on = torch.tensor([time.monotonic() < deadline or not trained.measured.units[PLACEBO]])
        dist.broadcast(goes_on, 0)
        if not goes_on:
            break
    results.send(trained.measured)
    dist.barrier()
    dist.destroy_process_group()


class _Rank:
    """One rank: what it trains, and what it has measured."""

    def __init__(self, cpu: int, length: Length, workload: Workload) -> None:
        self._cpu, self._length, self._workload = cpu, length, workload
        self.measured = Measured()
        self._attach_seconds = 0.1
        # The same on all ranks.
        self._chance = random.Random(0)

    def round(self, way: str) -> None:
        """Attach or not, settle, and measure the units of a round."""
        length = self._length
        gc.collect()
        switch = Switch(self._workload.model, self._workload.optimizer)
        client = None
        if way == ATTACHED:
            began = time.monotonic()
            client = torchperfd.attach(job="settled")
            self._attach_seconds = time.monotonic() - began
        else:
            time.sleep(self._attach_seconds)
        dist.barrier()
        began_at = time.perf_counter_ns()
        self._even(length.settling_steps)
        _, ended_at = self._workload.ends[FIRST_STEPS - 1]
        self.measured.first_ns[way].append((ended_at - began_at) / FIRST_STEPS)
        if client is not None:
            before = _client_threads()
            self.measured.even_ns += self._even(length.even_steps)
            self._add_threads(before)
        # Some hooks come with the first step.
        switch.learn()
        seen = 0
        for _ in range(length.units):
            # Which of them is outside, chance decides: what comes regularly would come to one side.
            outer = self._chance.random() < 0.5
            unit = []
            for is_on in (outer, not outer, not outer, outer):
                switch.on() if is_on else switch.off()
                unit.append(self._block(is_on=is_on))
                seen += is_on * (length.switched_steps + length.block_steps)
            self.measured.units[way].append(unit)
        switch.on()
        if client is not None:
            _detach(client, seen)

    def _even(self, steps: int) -> int:
        """Train so many steps or more; return what they took in all, in nanoseconds."""
        began, ends = time.perf_counter_ns(), self._workload.ends
        ends.clear()
        while len(ends) < steps:
            self._workload.plain(self._workload.loader)
        return time.perf_counter_ns() - began

    def _block(self, *, is_on: bool) -> Block:
        """Train the steps of a block, and time all but its first."""
        ends, skipped = self._workload.ends, self._length.switched_steps
        ends.clear()
        began = _Use.now(self._cpu)
        for number, _ in enumerate(self._workload.steps(self._workload.loader), 1):
            ends.append(now())
            if number == skipped:
                began = _Use.now(self._cpu)
        others = began.others_until(_Use.now(self._cpu))
        timed = itertools.pairwise(ends[skipped - 1 :])
        cpu_ns, wall_ns = zip(*((cpu - was, wall - at) for (was, at), (cpu, wall) in timed), strict=True)
        return Block(is_on, wall_ns, cpu_ns, others)

    def _add_threads(self, began: Mapping[str, int]) -> None:
        for name, ns in _client_threads().items():
            self.measured.thread_ns[name] = self.measured.thread_ns.get(name, 0) + ns - began.get(name, 0)


@dataclass(frozen=True, slots=True)
class _Use:
    """The use of a CPU up to a moment, in seconds: by all, and by this process; and the moment."""

    all_seconds: float
    own_seconds: float
    at: float

    @classmethod
    def now(cls, cpu: int) -> "_Use":
        columns = next(
            line.split() for line in _STAT.read_text().splitlines() if line.startswith(f"cpu{cpu} ")
        )
        used = sum(int(columns[place]) for place in _USED) / os.sysconf("SC_CLK_TCK")
        return cls(used, time.process_time(), time.monotonic())

    def others_until(self, end: "_Use") -> float:
        """Return the share of the CPU that others had."""
        others = end.all_seconds - self.all_seconds - (end.own_seconds - self.own_seconds)
        return max(0.0, others / (end.at - self.at))


def _client_threads() -> dict[str, int]:
    """Return the CPU time of the client's threads so far, in nanoseconds, by name."""
    return {
        thread.name: int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0])
        for thread in threading.enumerate()
        if thread.name.startswith(_CLIENT_THREADS)
    }


def _detach(client: Client, steps: int) -> None:
    """Detach; raises RuntimeError if the client saw fewer steps than were on, or left a hook behind."""
    seen = client.report().to_dict()["train"]
    client.detach()
    if seen["steps"] < steps:
        raise RuntimeError(
            f"torchperfd saw {seen['steps']} of {steps} steps, phases {sorted(seen['phases'])}"
        )
    if torch.autograd.backward is not _UNTOUCHED_BACKWARD:
        raise RuntimeError("torchperfd left a hook behind")


if __name__ == "__main__":
    sys.exit(main())
