"""What each hook adds to a step.

    python -m benchmarks.overhead.parts
    python -m benchmarks.overhead.parts --ddp

In one process, blocks of a few steps alternate with no hook on and with all, or all but one. Prints by
how much CPU time of the training thread an undisturbed step is longer than with none: the mean over rounds
without the fifth at either end, and its standard error. Where the memory of a process happens to lie is
worth a microsecond or two, the same to all of them: to be compared with one another, not with another run.
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Collection
from typing import Final

from benchmarks.overhead.contestants import CONTESTANTS
from benchmarks.overhead.switch import HOOKS, Switch
from benchmarks.overhead.worker import Steps
from benchmarks.overhead.workload import Workload, now
from tests.support.node import Node

PARTS: Final = {
    "draw": "__next__",
    "zero_grad": "zero_grad",
    "forward": "_compiled_call_impl",
    "backward": "backward",
    "reducer": "prepare_for_backward",
    "optimizer": HOOKS,
}
"""What is replaced for each; without DDP there is no reducer."""
_BLOCK_STEPS: Final = 20
_TRIMMED: Final = 5  # the part at either end


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead.parts")
    parser.add_argument("--seconds", type=float, default=180.0, help="how long to measure")
    parser.add_argument("--ddp", action="store_true", help="in a rank of DistributedDataParallel")
    options = parser.parse_args()
    node = Node()
    try:
        node.start_daemon()
        os.environ.update(node.env, CUDA_VISIBLE_DEVICES="")
        contestant = CONTESTANTS["torchperfd"](Workload(_BLOCK_STEPS, replicated=options.ddp))
        contestant.attach()
        added = _measure(contestant.switch, contestant.workload, options.seconds)
        contestant.on()
        contestant.detach()
    finally:
        node.close()
    _print(added)
    return 0


def _measure(switch: Switch, workload: Workload, seconds: float) -> dict[str, list[float]]:
    """Return by how many µs each round's steps are longer, by what is on."""
    there = {part: name for part, name in PARTS.items() if name in switch.names}
    left_out: dict[str, Collection[str]] = {"all": ()} | {f"all but {part}": {there[part]} for part in there}
    added: dict[str, list[float]] = {on: [] for on in left_out}
    order, chance = list(left_out), random.Random(0)

    def block(leave_out: Collection[str], into: Steps) -> None:
        switch.off()
        switch.on(leave_out)
        workload.plain(workload.warm_loader)
        workload.ends.clear()
        began = now()
        workload.plain(workload.loader)
        into.add([began, *workload.ends])

    ends = time.monotonic() + seconds
    while time.monotonic() < ends or len(added["all"]) < _TRIMMED:
        chance.shuffle(order)
        for on in order:
            # Side by side, and mirrored: a machine changes its speed within tenths of a second.
            without, measured = Steps(), Steps()
            outer = chance.random() < 0.5
            for is_on in (outer, not outer, not outer, outer):
                block(left_out[on] if is_on else switch.names, measured if is_on else without)
            added[on].append((measured.quiet_ns - without.quiet_ns) / 1e3)
    switch.off()
    return added


def _print(added: dict[str, list[float]]) -> None:
    for on, rounds in added.items():
        cut = len(rounds) // _TRIMMED
        kept = sorted(rounds)[cut : len(rounds) - cut]
        # Of a trimmed mean: what is cut counts as what is left at that end.
        error = statistics.pstdev([kept[0]] * cut + kept + [kept[-1]] * cut) / len(rounds) ** 0.5
        share = 1 - 2 / _TRIMMED
        print(f"{on:<20} {statistics.fmean(kept):>+6.1f} µs ± {error / share:.1f}   ({len(rounds)} rounds)")


if __name__ == "__main__":
    sys.exit(main())
