"""A trial of a script: the changes that are tried, what one run gave, and whether two train the same. Pure.

Changes are made without editing the script. A run gives the length of its steps, its losses, and what the
script is made of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torchperfd.model.loader_facts import LoaderAdvice, LoaderFacts, WorkerCost
from torchperfd_daemon.loader_workers import advise_loader

LOADER: Final = "loader"
OPTIMIZER: Final = "optimizer"
ZERO_GRAD: Final = "zero_grad"
THREADS: Final = "threads"
MATMUL: Final = "matmul"
AMP: Final = "amp"
COMPILE: Final = "compile"

BATCHES: Final = "batches"
EXACT: Final = "exact"
CLOSE: Final = "close"
ANY: Final = "any"

_LOSSES: Final = {LOADER: BATCHES, ZERO_GRAD: EXACT, OPTIMIZER: CLOSE, THREADS: CLOSE}


@dataclass(frozen=True, slots=True)
class Change:
    """One change.

    Attributes:
        target: What is changed: one of this module's constants.
    """

    target: str
    values: tuple[tuple[str, Any], ...] = ()

    @property
    def losses(self) -> str:
        """How losses must compare: ``exact``, ``batches`` (or else the same ones), ``close`` or ``any``."""
        return _LOSSES.get(self.target, ANY)

    @property
    def arguments(self) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in self.values)

    def code(self, name: str = "") -> str:
        """Return what to write.

        Args:
            name: Class of the optimizer or the loader in the script; a general one by default.
        """
        if self.target == LOADER:
            return f"{name or 'DataLoader'}(..., {self.arguments})"
        if self.target == OPTIMIZER:
            return f"{name or 'Optimizer'}(..., {self.arguments})"
        if self.target == ZERO_GRAD:
            return f"zero_grad({self.arguments})"
        first = repr(self.values[0][1]) if self.values else ""
        if self.target == THREADS:
            return f"torch.set_num_threads({first})"
        if self.target == MATMUL:
            return f"torch.set_float32_matmul_precision({first})".replace("'", '"')
        if self.target == AMP:
            return "torch.autocast(device, dtype=torch.bfloat16)"
        return "model.compile()"

    def to_dict(self) -> dict[str, Any]:
        return {"target": self.target, "values": dict(self.values)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "Change":
        return cls(document["target"], tuple(document["values"].items()))


def change(target: str, **values: Any) -> Change:
    return Change(target, tuple(values.items()))


def merged(kept: tuple[Change, ...], new: Change) -> tuple[Change, ...]:
    """Return the changes with one more, which replaces an earlier one of the same target."""
    return (*(each for each in kept if each.target != new.target), new)


@dataclass(frozen=True, slots=True)
class Site:
    """A line of the script's own code."""

    file: str
    line: int


@dataclass(frozen=True, slots=True)
class ScriptLoader:
    """A DataLoader that the script trains from.

    Attributes:
        site: The line that makes it; None where that is not the script's.
        prefetch: ``prefetch_factor``; 0 without workers.
        is_iterable: Its dataset is iterable: other workers would give other data.
    """

    site: Site | None
    name: str
    workers: int
    prefetch: int
    is_persistent: bool
    is_pinned: bool
    is_iterable: bool


@dataclass(frozen=True, slots=True)
class ScriptOptimizer:
    """An optimizer.

    Attributes:
        site: The line that makes it; None where that is not the script's.
        tensors: How many parameters it updates.
    """

    site: Site | None
    name: str
    can_fuse: bool
    can_foreach: bool
    fused: bool | None
    foreach: bool | None
    tensors: int


@dataclass(frozen=True, slots=True)
class ScriptFacts:
    """What a script is made of.

    Attributes:
        loaders: Those that it trains from.
        optimizers: All that it makes.
        zeroing: Lines that call ``zero_grad`` with ``set_to_none=False``.
        threads_site: The line that sets them; None without one.
    """

    loaders: tuple[ScriptLoader, ...] = ()
    optimizers: tuple[ScriptOptimizer, ...] = ()
    zeroing: tuple[Site, ...] = ()
    threads: int = 1
    threads_site: Site | None = None
    cpus: float = 1.0
    uses_cuda: bool = False
    matmul_precision: str = "highest"


@dataclass(frozen=True, slots=True)
class Trial:
    """One run.

    Attributes:
        step_seconds: Mean training step, after the first ones.
        phases: Mean seconds of a step by phase.
        losses: The first ones, on which ``backward`` was called.
        batches: Check sums of the indices of the first batches, in the sampler's order.
        loader: How the loop used its loader; None where no draw was sampled.
    """

    step_seconds: float
    steps: int
    phases: Mapping[str, float] = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    batches: tuple[int, ...] = ()
    facts: ScriptFacts = field(default_factory=ScriptFacts)
    loader: LoaderFacts | None = None

    def share(self, phase: str) -> float:
        return self.phases.get(phase, 0.0) / self.step_seconds if self.step_seconds else 0.0

    def has_workers(self, count: int) -> bool:
        return any(each.workers == count for each in self.facts.loaders)

    def loader_advice(self, cost: WorkerCost) -> LoaderAdvice | None:
        """Return what the rule of the live verdict advises for the loader; None without advice."""
        if self.loader is None:
            return None
        on_device, data = self.facts.uses_cuda, self.phases.get("data", 0.0)
        return advise_loader(self.loader, self.step_seconds, data, cost, on_device=on_device)


RELATIVE_TOLERANCE: Final = 1e-4
"""Sums in another order differ by so much at most, after a few steps."""
_ABSOLUTE_TOLERANCE: Final = 1e-6
MIN_LOSSES: Final = 3


@dataclass(frozen=True, slots=True)
class LossCheck:
    """How the losses of a run compare with those without a change.

    Attributes:
        result: ``equal``, ``close``, ``differ`` or ``not checked``.
    """

    result: str
    is_allowed: bool
    words: str


def repeats(first: Trial, again: Trial) -> str:
    """Return how an unchanged run repeats itself: ``exact``, ``close``, or ``any`` where it does not."""
    count = min(len(first.losses), len(again.losses))
    if count < MIN_LOSSES:
        return ANY
    if first.losses[:count] == again.losses[:count]:
        return EXACT
    return CLOSE if _are_close(first.losses[:count], again.losses[:count]) else ANY


def check_losses(unchanged: Trial, changed: Trial, required: str, repeated: str) -> LossCheck:
    """Compare the losses of a change with those of the script without it.

    Args:
        required: How the losses must compare, of :attr:`Change.losses`.
        repeated: How an unchanged run repeats itself, of :func:`repeats`.
    """
    count = min(len(unchanged.losses), len(changed.losses))
    if repeated == ANY or count < MIN_LOSSES:
        reason = "no losses were seen" if not unchanged.losses else "two unchanged runs differ"
        return LossCheck("not checked", True, f"losses not checked: {reason}")
    ours, theirs = changed.losses[:count], unchanged.losses[:count]
    if ours == theirs:
        return LossCheck("equal", True, f"first {count} losses equal")
    if _are_close(ours, theirs) and (required in (ANY, CLOSE) or repeated == CLOSE):
        return LossCheck("close", True, f"first {count} losses equal within {RELATIVE_TOLERANCE:g}")
    largest = max(abs(a - b) / max(abs(b), _ABSOLUTE_TOLERANCE) for a, b in zip(ours, theirs, strict=True))
    differ = f"losses differ, by up to {largest:.2g} of their value"
    if required == ANY:
        return LossCheck("differ", True, f"{differ}: this change may do that")
    if required == BATCHES and _are_same_batches(unchanged, changed):
        reason = (
            "the indices of the batches are equal, so the dataset itself varies, as with random augmentation"
        )
        return LossCheck("differ", True, f"{differ}: {reason}")
    return LossCheck("differ", False, differ)


def _are_close(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    # Not a number is equal to itself here: both runs have diverged at the same step.
    return all(
        abs(a - b) <= max(RELATIVE_TOLERANCE * abs(b), _ABSOLUTE_TOLERANCE) or (a != a and b != b)
        for a, b in zip(ours, theirs, strict=True)
    )


def _are_same_batches(unchanged: Trial, changed: Trial) -> bool:
    count = min(len(unchanged.batches), len(changed.batches))
    return count >= MIN_LOSSES and unchanged.batches[:count] == changed.batches[:count]
