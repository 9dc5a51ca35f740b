"""The report: one account, rendered as the phase table or as a versioned document. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchperfd.account import Account, KindAccount
from torchperfd.phases import PhaseNames

RUN_SCHEMA = "torchperfd.run/1"


@dataclass(frozen=True, slots=True)
class PhaseLine:
    """One row of the phase table; times in seconds."""

    phase: str
    calls: int
    mean_seconds: float
    std_seconds: float
    seconds_total: float
    share: float


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank spent its steps on."""

    rank: int
    account: Account
    names: PhaseNames

    def lines(self, kind: KindAccount) -> Iterator[PhaseLine]:
        """Yield the phases that occurred, longest first."""
        slots = [slot for slot in range(len(self.names)) if kind.phases[slot].calls]
        for slot in sorted(slots, key=lambda slot: -kind.phases[slot].ns):
            phase = kind.phases[slot]
            yield PhaseLine(
                phase=self.names.name(slot),
                calls=phase.calls,
                mean_seconds=phase.mean_seconds,
                std_seconds=phase.std_seconds,
                seconds_total=phase.seconds,
                share=phase.ns / kind.ns if kind.ns else 0.0,
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the rank's part of a ``torchperfd.run/1`` document."""
        return {
            "rank": self.rank,
            "train": self._kind_dict(self.account.train),
            "validate": self._kind_dict(self.account.validate),
        }

    def _kind_dict(self, kind: KindAccount) -> dict[str, Any]:
        return {
            "steps": kind.steps,
            "step_seconds_total": kind.ns / 1e9,
            "samples": kind.samples,
            "phases": {
                line.phase: {
                    "calls": line.calls,
                    "seconds_total": line.seconds_total,
                    "mean_seconds": line.mean_seconds,
                    "std_seconds": line.std_seconds,
                }
                for line in self.lines(kind)
            },
        }

    def to_text(self) -> str:
        """Return the phase table, for people."""
        blocks = [
            "\n".join(self._table(title, kind))
            for title, kind in (("train", self.account.train), ("validate", self.account.validate))
            if kind.steps
        ]
        if not blocks:
            return f"rank {self.rank}: no step was seen"
        return "\n\n".join(blocks)

    def __str__(self) -> str:
        return self.to_text()

    def _table(self, title: str, kind: KindAccount) -> Iterator[str]:
        mean = kind.ns / kind.steps
        head = f"rank {self.rank} · {title} · {kind.steps} steps · {duration(mean / 1e9)} a step"
        if kind.samples and kind.ns:
            head += f" · {kind.samples / (kind.ns / 1e9):,.0f} samples/s"
        yield head
        yield f"  {'phase':<16} {'calls':>8} {'mean':>10} {'std':>10} {'total':>10} {'share':>7}"
        for line in self.lines(kind):
            yield (
                f"  {line.phase:<16.16} {line.calls:>8} {duration(line.mean_seconds):>10} "
                f"{duration(line.std_seconds):>10} {duration(line.seconds_total):>10} {line.share:>7.1%}"
            )


def run_document(run: str, ranks: list[RankReport], verdict: dict[str, Any] | None) -> dict[str, Any]:
    """Return the ``torchperfd.run/1`` document that ``torchperfd run --report`` writes."""
    return {
        "schema": RUN_SCHEMA,
        "run": run,
        "ranks": [rank.to_dict() for rank in sorted(ranks, key=lambda rank: rank.rank)],
        "verdict": verdict,
    }


def duration(seconds: float) -> str:
    """Return a time in the unit that reads best, three significant digits."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        # What three digits would round up to 1000 of one unit is 1 of the next.
        if seconds >= scale * 0.99949:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"
