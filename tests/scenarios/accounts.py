"""What an account must be true to: the calls, the sums, and the script's own watch."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torchperfd

PAUSE_S = 0.006
"""What a step of a timed scenario sleeps, so that two in a hundred are not noise."""

_TOLERANCE = 0.02
_ATTEMPTS = 3


def calls(client: torchperfd.Client, kind: str = "train") -> dict[str, int]:
    """Return how often each phase occurred, and ``steps``; check that phases sum to the steps."""
    account = client.report().totals
    totals = getattr(account, kind)
    assert sum(phase.ns for phase in totals.phases) == totals.ns
    counted = {
        client.parts.instruments.names.name(slot): totals.phases[slot].calls
        for slot in range(len(client.parts.instruments.names))
        if totals.phases[slot].calls
    }
    return {"steps": totals.steps, **counted}


def train_tallies(client: torchperfd.Client) -> tuple[int, int]:
    """Return micro-batches and skipped optimizer steps."""
    train = client.report().totals.train
    return train.micro_batches, train.skipped


class Watch:
    """The script's own watch: runs while its loops do. ``ended`` is when the newest did."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.ended = 0.0

    def over(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Run from the first draw to the end of the last batch; making the iterator is set-up."""
        iterator = iter(batches)
        began = self.ended = time.perf_counter()
        for batch in iterator:
            yield batch
            self.ended = time.perf_counter()
        self.seconds += self.ended - began


def assert_accounted(
    client: torchperfd.Client, run: Callable[[Watch], None], *, has_loader: bool = True
) -> None:
    """Run a script, at most three times on a busy machine, until its watch and our account agree.

    The first run, of which nothing is compared, finds the model and imports what torch needs. Without a
    loader nothing shows where a loop begins: what lies between two runs is part of the second's first step.
    """
    watch = Watch()
    run(watch)
    differences = []
    for _ in range(_ATTEMPTS):
        before = _accounted(client)
        last, watch = watch, Watch()
        run(watch)
        accounted = _accounted(client) - before
        assert watch.seconds > 20 * PAUSE_S
        differences.append(accounted / (watch.seconds if has_loader else watch.ended - last.ended) - 1)
        if abs(differences[-1]) < _TOLERANCE:
            return
    raise AssertionError(f"the account is off by {differences} of the script's own time")


def _accounted(client: torchperfd.Client) -> float:
    account = client.report().totals
    return (account.train.ns + account.validate.ns) / 1e9
