"""Ranks' reports out of a run's document: the totals that ``report.document`` has written, read again."""

from dataclasses import fields
from typing import Any

from torchperfd.model.loader_facts import InputStages
from torchperfd.model.loader_workers import LoaderFacts
from torchperfd.model.process import HookState, HostMemory
from torchperfd.model.source_lines import SyncWait
from torchperfd.report import RankReport
from torchperfd.runs.values import MAX_LARGE, count, number, optional, text
from torchperfd.steps.phases import PhaseNames
from torchperfd.steps.totals import CudaMemory, GcTotals, KindTotals, PhaseTotals, Totals


def read_reports(document: dict[str, Any]) -> tuple[RankReport, ...]:
    """Return each rank's report, by rank.

    Args:
        document: Of schema ``torchperfd.run/1``; an older one lacks what its version did not keep.
    """
    found = []
    for each in document["ranks"]:
        names = PhaseNames()
        found.append(RankReport(count(each["rank"]), _totals(each, names), names))
    return tuple(sorted(found, key=lambda report: report.rank))


def _totals(rank: dict[str, Any], names: PhaseNames) -> Totals:
    passes, fit = rank.get("passes") or {}, rank.get("fit")
    totals = Totals(
        train=_kind(rank["train"], names),
        validate=_kind(rank.get("validate"), names),
        warmup=_kind(rank.get("warmup"), names),
        checkpoint=_phase(rank.get("checkpoint")),
        background_saves=_phase(rank.get("background_saves")),
        epoch=_phase(passes.get("epoch")),
        train_pass=_phase(passes.get("train")),
        validate_pass=_phase(passes.get("validate")),
        gc=tuple(GcTotals(count(each["calls"]), _ns(each)) for each in rank.get("gc") or ()),
        flops_per_step=optional(rank.get("flops_per_step"), MAX_LARGE),
        peak_flops=optional(rank.get("peak_flops_per_second"), MAX_LARGE),
        overhead=optional(rank.get("overhead_ratio")),
        degradation_level=count(rank.get("shed_tiers") or 0),
        loader=_loader(rank.get("input_stages")),
        hooks=tuple(
            HookState(text(each["name"]), text(each.get("reason"))) for each in rank.get("hooks") or ()
        ),
        sync_waits=tuple(
            SyncWait(text(each["file"]), count(each["line"]), text(each["call"]), _ns(each))
            for each in rank.get("sync_waits") or ()
        ),
    )
    if totals.warmup.steps > totals.train.steps or totals.warmup.ns > totals.train.ns:
        raise ValueError("its first step is no part of its steps")
    if fit is not None:
        # Only the distance is kept; a beginning of 0 would mean that it is unknown.
        totals.began_ns, totals.ended_ns = 1, 1 + _ns(fit)
    if (memory := rank.get("host_memory")) is not None:
        totals.host_memory = HostMemory(
            *(count(memory[name], MAX_LARGE) for name in ("resident_bytes", "peak_bytes"))
        )
    if (cuda := rank.get("cuda")) is not None:
        totals.cuda = CudaMemory(
            allocated=count(cuda["allocated_bytes"], MAX_LARGE),
            reserved=count(cuda["reserved_bytes"], MAX_LARGE),
            peak=count(cuda["peak_bytes"], MAX_LARGE),
        )
    return totals


def _kind(kind: dict[str, Any] | None, names: PhaseNames) -> KindTotals:
    totals = KindTotals()
    if kind is None:
        return totals
    totals.steps = count(kind["steps"])
    totals.ns = round(1e9 * number(kind["step_seconds_total"]))
    if (deviation := optional(kind.get("step_std_seconds"))) is not None:
        totals.squares = _squares(totals.steps, totals.ns, deviation)
    for name in ("samples", "tokens", "micro_batches", "skipped"):
        setattr(totals, name, count(kind.get(name) or 0, MAX_LARGE))
    for name, phase in (kind.get("phases") or {}).items():
        # Names beyond the limit share a slot.
        slot = names.slot(text(name))
        totals.phases[slot] = _sum(totals.phases[slot], _phase(phase))
    return totals


def _phase(phase: dict[str, Any] | None) -> PhaseTotals:
    if phase is None:
        return PhaseTotals()
    calls, ns = count(phase["calls"]), _ns(phase)
    squares = _squares(calls, ns, number(phase.get("std_seconds") or 0))
    device = phase.get("device") or {"seconds_total": 0, "calls": 0}
    return PhaseTotals(calls, ns, squares, _ns(device), count(device["calls"]))


def _squares(calls: int, ns: int, deviation_seconds: float) -> float:
    return calls * ((1e9 * deviation_seconds) ** 2 + (ns / calls) ** 2) if calls else 0.0


def _sum(one: PhaseTotals, other: PhaseTotals) -> PhaseTotals:
    return PhaseTotals(*(getattr(one, each.name) + getattr(other, each.name) for each in fields(PhaseTotals)))


def _loader(stages: dict[str, Any] | None) -> LoaderFacts | None:
    if stages is None:
        return None
    known: dict[str, Any] = {each.name: optional(stages.get(each.name)) for each in fields(InputStages)}
    for name in ("workers", "samples"):
        known[name] = int(known[name] or 0)
    return LoaderFacts(stages=InputStages(**known))


def _ns(times: dict[str, Any]) -> int:
    return round(1e9 * number(times["seconds_total"]))
