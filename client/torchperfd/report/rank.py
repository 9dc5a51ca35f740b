"""One rank's report, which ``client.report()`` returns, and the ``torchperfd.run/1`` document.

Scripts depend on the document's names and units: fields are only added.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from torchperfd.model.messages import to_document
from torchperfd.model.totals import PhaseTotals
from torchperfd.report.numbers import Table, between_ns, fit_ns, steady_steps, tabulate
from torchperfd.safety.interrupts import import_apart
from torchperfd.steps.phases import PhaseNames
from torchperfd.steps.step_series import BlockSums
from torchperfd.steps.totals import KindTotals, Totals

if TYPE_CHECKING:
    from torchperfd.document.blocks import Document


def rank_document(
    rank: int, totals: Totals, names: PhaseNames, blocks: BlockSums | None = None
) -> dict[str, Any]:
    """Return one rank's part of a ``torchperfd.run/1`` document.

    ``train`` has all steps, the first included; ``warmup`` is that first one again, by itself.
    What the rank does not know is null: ``fit``, for one, where only its totals are known.
    """
    return {
        "rank": rank,
        "train": _kind(totals.train, names),
        "validate": _kind(totals.validate, names),
        "warmup": _kind(totals.warmup, names),
        "fit": {"seconds_total": fit_ns(totals) / 1e9, "between_seconds": between_ns(totals) / 1e9}
        if totals.began_ns
        else None,
        "passes": {
            "epoch": _times(totals.epoch),
            "train": _times(totals.train_pass),
            "validate": _times(totals.validate_pass),
        },
        "checkpoint": _times(totals.checkpoint),
        "background_saves": _times(totals.background_saves),
        "sync_waits": [to_document(wait) for wait in totals.sync_waits],
        "gc": [
            {"generation": generation, **to_document(pauses)} for generation, pauses in enumerate(totals.gc)
        ],
        "loader_ready_batches": totals.loader_ready,
        "input_stages": _part(totals.loader.stages if totals.loader else None),
        "cuda": _part(totals.cuda, without=("device_uuid",)),
        "host_memory": _part(totals.host_memory),
        "flops_per_step": totals.flops_per_step,
        "peak_flops_per_second": totals.peak_flops,
        "model_flops_utilization": totals.flops_utilization(steady_steps(totals)),
        "overhead_ratio": totals.overhead,
        "shed_tiers": totals.degradation_level,
        "hooks": [
            {"name": hook.name, "on": hook.is_on, "reason": hook.reason or None} for hook in totals.hooks
        ],
        "coordinates": [to_document(place) for place in totals.coordinates],
        "blocks": blocks_document(blocks, names) if blocks is not None else None,
    }


def blocks_document(blocks: BlockSums, names: PhaseNames) -> dict[str, Any] | None:
    """Return blocks of steps as they are written: mean seconds of a step, to five digits; None for none."""
    if not blocks.step_ns:
        return None

    def means(column: tuple[int, ...]) -> list[float]:
        return [float(f"{ns / blocks.steps / 1e9:.5g}") for ns in column]

    return {
        "steps": blocks.steps,
        "step_seconds": means(blocks.step_ns),
        "phases": {names.name(slot): means(column) for slot, column in blocks.phase_ns.items()},
    }


def _part(own: Any, without: Collection[str] = ()) -> dict[str, Any] | None:
    return None if own is None else to_document(own, without)


def _kind(kind: KindTotals, names: PhaseNames) -> dict[str, Any]:
    slots = [slot for slot in range(len(names)) if kind.phases[slot].calls]
    slots.sort(key=lambda slot: -kind.phases[slot].ns)
    return {
        "steps": kind.steps,
        "step_seconds_total": kind.ns / 1e9,
        "step_std_seconds": kind.std_seconds,
        "samples": kind.samples,
        "tokens": kind.tokens,
        "micro_batches": kind.micro_batches,
        "skipped": kind.skipped,
        "phases": {
            names.name(slot): {**_times(kind.phases[slot]), "device": _on_device(kind.phases[slot])}
            for slot in slots
        },
    }


def _times(phase: PhaseTotals) -> dict[str, Any]:
    return {
        "calls": phase.calls,
        "seconds_total": phase.seconds,
        "mean_seconds": phase.mean_seconds,
        "std_seconds": phase.std_seconds,
    }


def _on_device(phase: PhaseTotals) -> dict[str, Any] | None:
    if not phase.device_calls:
        return None
    return {
        "calls": phase.device_calls,
        "seconds_total": phase.device_ns / 1e9,
        "mean_seconds": phase.device_mean_seconds,
    }


@cache
def load_layouts() -> None:
    """Import what lays out reports, which a training process pays for only when it asks for one.

    Whatever else imports a layout on the script's thread calls this first.
    """
    import_apart("torchperfd.document.markup", "torchperfd.report.phase_table")


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank spent its time on.

    ``print`` it in a terminal; in a notebook, it is a table by itself.

    Attributes:
        totals: The totals it was made of; must not change any more.
        names: What their phases are called.
        dropped: Steps that the recorder had to throw away.
        blocks: Sums of consecutive steps; None before the loop has ended, and where they are unknown.
        table: Every number that is shown.
    """

    rank: int
    totals: Totals
    names: PhaseNames
    dropped: int = 0
    blocks: BlockSums | None = None
    table: Table = field(init=False)

    def __post_init__(self) -> None:
        table = tabulate(self.rank, self.totals, self.names, dropped=self.dropped)
        object.__setattr__(self, "table", table)

    @property
    def account(self) -> Totals:
        """The totals, by the name that they had before; scripts use it."""
        return self.totals

    def document(self) -> "Document":
        """Return the phase table as a document."""
        load_layouts()
        from torchperfd.report import phase_table

        return phase_table.document(self.table)

    def to_text(self, width: int | None = None) -> str:
        """Return the phase table for a terminal.

        Args:
            width: Columns that it may take; by default as many as it needs, less than 100.
        """
        load_layouts()
        from torchperfd.document import terminal

        return terminal.render(self.document(), terminal.Page(width))

    def to_markdown(self) -> str:
        """Return the phase table as GitHub-flavoured Markdown."""
        load_layouts()
        from torchperfd.document import markup

        return markup.render_markdown(self.document())

    def to_html(self) -> str:
        """Return the phase table as HTML that needs nothing else."""
        load_layouts()
        from torchperfd.document import markup

        return markup.render_html(self.document())

    def to_csv(self) -> str:
        """Return the phase table as comma-separated values, in seconds."""
        load_layouts()
        from torchperfd.document import markup
        from torchperfd.report import phase_table

        return markup.render_csv(phase_table.raw_document(self.table))

    def to_dict(self) -> dict[str, Any]:
        """Return the rank's part of a ``torchperfd.run/1`` document."""
        return rank_document(self.rank, self.totals, self.names, self.blocks)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        return self.to_html()


RUN_SCHEMA: Final = "torchperfd.run/1"


def run_document(run: str, ranks: list[RankReport], verdict: dict[str, Any] | None) -> dict[str, Any]:
    """Return the document that ``torchperfd run --report`` writes.

    Args:
        verdict: As ``torchperfd diagnose --json`` gives it; None without a daemon.
    """
    return {
        "schema": RUN_SCHEMA,
        "run": run,
        "ranks": [rank.to_dict() for rank in sorted(ranks, key=lambda rank: rank.rank)],
        "verdict": verdict,
    }
