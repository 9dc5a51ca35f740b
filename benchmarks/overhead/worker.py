"""One contestant's process: alternates between off and on at each request.

    python worker.py SOCKET CONTESTANT STEPS [ddp]

What comes over the socket is called with the contestant, and its answer, a :class:`Round`, sent back; of
anything that goes wrong, its text.
"""

import gc
import itertools
import random
import statistics
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Client
from typing import Any

from benchmarks.overhead.contestants import CONTESTANTS, Contestant
from benchmarks.overhead.workload import WARM_STEPS, Workload, now
from torch.utils.data import DataLoader

_chance = random.Random(0)


@dataclass(slots=True)
class Steps:
    """What each of some steps took: CPU time of the training thread, and wall time.

    ``relative`` is the wall time in units of the median step of its alternation: within one the
    machine is the same, over all of them it is not.
    """

    cpu_ns: list[int] = field(default_factory=list)
    wall_ns: list[int] = field(default_factory=list)
    relative: list[float] = field(default_factory=list)

    def add(self, ends: list[tuple[int, int]]) -> None:
        """Add the steps between the given times."""
        for (began_cpu, began), (ended_cpu, ended) in itertools.pairwise(ends):
            self.cpu_ns.append(ended_cpu - began_cpu)
            self.wall_ns.append(ended - began)

    @property
    def quiet_ns(self) -> float:
        """CPU time of an undisturbed step.

        A neighbour on the core only ever adds CPU time, up to as much again, so that the low
        end of the distribution stands still where its middle wanders.
        """
        return statistics.quantiles(self.cpu_ns, n=10)[0]


@dataclass(slots=True)
class Round:
    """The steps between one attach and its detach, alternating between on and off."""

    off: Steps = field(default_factory=Steps)
    on: Steps = field(default_factory=Steps)

    def end_alternation(self) -> None:
        """Relate the steps since the last alternation to one another."""
        both = (self.off, self.on)
        new = [steps.wall_ns[len(steps.relative) :] for steps in both]
        usual = statistics.median(itertools.chain(*new))
        for steps, walls in zip(both, new, strict=True):
            steps.relative += [wall / usual for wall in walls]

    @property
    def added_ns(self) -> float:
        """CPU time that being on adds to an undisturbed step."""
        return self.on.quiet_ns - self.off.quiet_ns

    @property
    def added_mean_ns(self) -> float:
        """The same of all steps: what comes rarely is in here, and so are the neighbours."""
        return statistics.fmean(self.on.cpu_ns) - statistics.fmean(self.off.cpu_ns)


def measure(contestant: Contestant, alternations: int) -> Round:
    """Measure one round: attach, alternate, check that all was seen, detach."""
    workload, measured, ahead = contestant.workload, Round(), Round()

    def block(train: Callable[[DataLoader[Any]], None], steps: Steps) -> None:
        train(workload.warm_loader)
        workload.ends.clear()
        began = now()
        train(workload.loader)
        steps.add([began, *workload.ends])

    gc.collect()
    contestant.attach()
    # The first one is not measured: attaching has an aftermath, on threads of its own.
    for into in (ahead, *(measured for _ in range(alternations))):
        # Off, on, on, off, or the reverse: a drift of the machine that is linear in time cancels out.
        # Which of them, chance decides: full collections come after a fixed number of allocations,
        # and would come to the same side in every round.
        outer = _chance.random() < 0.5
        for on in (outer, not outer, not outer, outer):
            if on:
                contestant.on()
                block(contestant.train, into.on)
            else:
                contestant.off()
                block(workload.plain, into.off)
        into.end_alternation()
    contestant.on()
    contestant.check((alternations + 1) * 2 * (WARM_STEPS + len(workload.loader)))
    contestant.detach()
    return measured


def main(address: str, name: str, steps: int, *, replicated: bool) -> None:
    with Client(address, "AF_UNIX") as benchmark:
        try:
            contestant = CONTESTANTS[name](Workload(steps, replicated=replicated))
            measure(contestant, 1)  # what it imports and looks for once is no step's cost
            benchmark.send(contestant.version())
            while True:
                benchmark.send(benchmark.recv()(contestant))
        except EOFError:
            pass
        except Exception as error:  # noqa: BLE001 - becomes a line of the table
            traceback.print_exc()
            benchmark.send(RuntimeError(f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    from benchmarks.overhead import worker  # not __main__: what is pickled must have a name

    address, name, steps, *rest = sys.argv[1:]
    worker.main(address, name, int(steps), replicated="ddp" in rest)
