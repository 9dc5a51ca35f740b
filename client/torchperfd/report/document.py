"""One rank's part of a ``torchperfd.run/1`` document: its names and units. Fields are only added."""

from dataclasses import asdict
from typing import Any

from torchperfd.report.numbers import between_ns, fit_ns, steady_steps
from torchperfd.steps.phases import PhaseNames
from torchperfd.steps.step_series import BlockSums
from torchperfd.steps.totals import KindTotals, PhaseTotals, Totals


def rank_document(
    rank: int, totals: Totals, names: PhaseNames, blocks: BlockSums | None = None
) -> dict[str, Any]:
    """Return one rank's part of a ``torchperfd.run/1`` document.

    ``train`` has all steps, the first included; ``warmup`` is that first one again, by itself.
    What the rank does not know is null: ``fit``, for one, where only its totals are known.
    """
    memory = totals.cuda
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
        "sync_waits": [
            {"file": wait.file, "line": wait.line, "call": wait.call, "seconds_total": wait.ns / 1e9}
            for wait in totals.sync_waits
        ],
        "gc": [
            {"generation": generation, "calls": pauses.calls, "seconds_total": pauses.ns / 1e9}
            for generation, pauses in enumerate(totals.gc)
        ],
        "loader_ready_batches": totals.ready,
        "input_stages": asdict(totals.loader.stages) if totals.loader and totals.loader.stages else None,
        "cuda": {
            "allocated_bytes": memory.allocated,
            "reserved_bytes": memory.reserved,
            "peak_bytes": memory.peak,
        }
        if memory is not None
        else None,
        "host_memory": asdict(totals.host_memory) if totals.host_memory is not None else None,
        "flops_per_step": totals.flops_per_step,
        "peak_flops_per_second": totals.peak_flops,
        "model_flops_utilization": totals.flops_utilization(steady_steps(totals)),
        "overhead_ratio": totals.overhead,
        "shed_tiers": totals.degradation_level,
        "hooks": [
            {"name": hook.name, "on": hook.is_on, "reason": hook.reason or None} for hook in totals.hooks
        ],
        "coordinates": [asdict(place) for place in totals.coordinates],
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
