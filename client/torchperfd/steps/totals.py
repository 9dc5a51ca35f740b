"""The account: what drained steps add up to, per kind of step and phase. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torchperfd.model.totals import GcTotals, PhaseTotals, ProcessTotals, StepTotals, deviation
from torchperfd.steps.phases import PHASE_SLOTS, TRAIN, VALIDATE, StepBatch


@dataclass(slots=True)
class KindTotals(StepTotals):
    """Totals of all steps of one kind.

    Attributes:
        phases: Totals by phase slot; their time sums to ``ns``.
    """

    phases: list[PhaseTotals] = field(default_factory=lambda: [PhaseTotals() for _ in range(PHASE_SLOTS)])

    @property
    def mean_seconds(self) -> float:
        """Mean time of a step; 0 before the first."""
        return self.ns / self.steps / 1e9 if self.steps else 0.0

    @property
    def std_seconds(self) -> float | None:
        """Population standard deviation of a step's time; None where it was not kept."""
        if not self.steps or (self.ns and not self.squares):
            return None
        return deviation(self.steps, self.ns, self.squares)

    def copy(self) -> "KindTotals":
        phases = [PhaseTotals(p.calls, p.ns, p.squares, p.device_ns, p.device_calls) for p in self.phases]
        return replace(self, phases=phases)

    def minus(self, part: "KindTotals") -> "KindTotals":
        """Return what remains without ``part``, which is contained in this."""
        return KindTotals(
            steps=self.steps - part.steps,
            ns=self.ns - part.ns,
            samples=self.samples - part.samples,
            phases=[own.minus(other) for own, other in zip(self.phases, part.phases, strict=True)],
            squares=max(0.0, self.squares - part.squares),
            micro_batches=self.micro_batches - part.micro_batches,
            skipped=self.skipped - part.skipped,
            tokens=self.tokens - part.tokens,
        )

    def add(self, batch: StepBatch) -> None:
        self.steps += batch.count
        self.ns += batch.total_ns
        self.squares += batch.squares
        self.samples += batch.total_samples
        for slot, columns in batch.phases.items():
            phase = self.phases[slot]
            phase.calls += columns.total_calls
            phase.ns += columns.total_ns
            phase.squares += columns.squares


@dataclass(slots=True)
class Totals(ProcessTotals):
    """Everything since attach.

    Attributes:
        train: All training steps, the first one included.
        validate: All validation steps.
        warmup: The first training step alone: what is initialised lazily is paid there.
        checkpoint: Always there, unlike that of an older client.
    """

    train: KindTotals = field(default_factory=KindTotals)
    validate: KindTotals = field(default_factory=KindTotals)
    warmup: KindTotals = field(default_factory=KindTotals)
    checkpoint: PhaseTotals = field(default_factory=PhaseTotals, kw_only=True)
    gc: tuple[GcTotals, ...] = field(
        default_factory=lambda: tuple(GcTotals() for _ in range(3)), kw_only=True
    )

    def add(self, drained: Iterable[StepBatch]) -> None:
        for batch in drained:
            self.began_ns = self.began_ns or batch.start[0]
            self.ended_ns = batch.start[-1] + batch.duration[-1]
            if (batch.kind[0], batch.index[0]) == (TRAIN, 0):
                self.warmup.add(batch)
            self.of(batch.kind[0]).add(batch)

    def copy(self) -> "Totals":
        """Return a copy that shares nothing that may change."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        copied: dict[str, Any] = {
            name: replace(value) for name, value in own.items() if isinstance(value, PhaseTotals)
        }
        return replace(
            self,
            **copied,
            train=self.train.copy(),
            validate=self.validate.copy(),
            warmup=self.warmup.copy(),
            gc=tuple(replace(generation) for generation in self.gc),
        )

    def steady(self) -> KindTotals:
        """Return the training steps after the first."""
        return self.train.minus(self.warmup)

    def flops_utilization(self, steps: KindTotals) -> float | None:
        """Return the part of the device's peak that training steps made use of (MFU); None where unknown."""
        if not self.flops_per_step or not self.peak_flops or steps.steps <= 0 or steps.ns <= 0:
            return None
        return self.flops_per_step * steps.steps / (steps.ns / 1e9) / self.peak_flops

    def of(self, kind: int) -> KindTotals:
        if kind == TRAIN:
            return self.train
        if kind == VALIDATE:
            return self.validate
        raise ValueError(f"no such kind of step: {kind}")
