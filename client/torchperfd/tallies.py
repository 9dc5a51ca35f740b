"""Tallies: what is counted beside the steps, and belongs into the account all the same."""

from torchperfd.account import Account, GcAccount, PhaseAccount
from torchperfd.loop import Loop
from torchperfd.pauses import GcPauses


class Tallies:
    """Reads the counters of the loop and of the garbage collector; plain reads, no lock."""

    def __init__(self, loop: Loop, pauses: GcPauses) -> None:
        self._loop = loop
        self._pauses = pauses

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written right now."""
        return self._loop.saving > 0

    def fill(self, account: Account) -> None:
        """Bring the account up to date. It may be a step ahead of the steps that were drained."""
        loop, pauses = self._loop, self._pauses
        account.train.micro_batches = loop.micro_batches
        account.train.skipped = loop.skipped
        account.checkpoint = PhaseAccount(loop.saves, loop.save_ns, loop.save_squares)
        account.gc = tuple(GcAccount(*totals) for totals in zip(pauses.calls, pauses.ns, strict=True))
        account.ready = loop.ready if loop.ready >= 0 else None
