"""What one run of the script gave: the length of its steps, its losses, and what it is made of. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchperfd.model.loader_workers import LoaderAdvice, LoaderFacts, WorkerCost, advise_loader


@dataclass(frozen=True, slots=True)
class Site:
    """A line of the script's own code.

    Attributes:
        file: Its path.
        line: Counted from 1.
    """

    file: str
    line: int


@dataclass(frozen=True, slots=True)
class ScriptLoader:
    """A DataLoader that the script trains from.

    Attributes:
        site: The line that makes it; None where that is not the script's.
        name: Its class.
        workers: ``num_workers``.
        prefetch: ``prefetch_factor``; 0 without workers.
        is_persistent: ``persistent_workers``.
        is_pinned: ``pin_memory``.
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
        name: Its class.
        can_fuse: It takes ``fused``.
        can_foreach: It takes ``foreach``.
        fused: As the script has it.
        foreach: As the script has it.
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
        threads: Of torch's operators.
        threads_site: The line that sets them; None without one.
        cpus: That the process may use.
        uses_cuda: It has initialised CUDA.
        matmul_precision: As ``torch.get_float32_matmul_precision`` gives it.
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
        steps: How many were measured.
        phases: Mean seconds of a step by phase.
        losses: The first ones, on which ``backward`` was called.
        batches: Check sums of the indices of the first batches, in the sampler's order.
        facts: What the script is made of.
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
        """Return the share of a step that a phase has, 0 to 1."""
        return self.phases.get(phase, 0.0) / self.step_seconds if self.step_seconds else 0.0

    def has_workers(self, count: int) -> bool:
        """Return whether this is the number of workers of the script's loaders."""
        return any(each.workers == count for each in self.facts.loaders)

    def loader_advice(self, cost: WorkerCost) -> LoaderAdvice | None:
        """Return what the rule of the live verdict advises for the loader; None without advice.

        Args:
            cost: Of moving a batch from a worker on this machine.
        """
        if self.loader is None:
            return None
        on_device, data = self.facts.uses_cuda, self.phases.get("data", 0.0)
        return advise_loader(self.loader, self.step_seconds, data, cost, on_device=on_device)


def read_trial(document: Mapping[str, Any]) -> Trial:
    """Return the run of a document that a trial process sent: ``dataclasses.asdict`` of a trial."""
    facts = document["facts"]
    return Trial(
        step_seconds=document["step_seconds"],
        steps=document["steps"],
        phases=document["phases"],
        losses=tuple(document["losses"]),
        batches=tuple(document["batches"]),
        facts=ScriptFacts(
            loaders=tuple(ScriptLoader(**_sited(each)) for each in facts["loaders"]),
            optimizers=tuple(ScriptOptimizer(**_sited(each)) for each in facts["optimizers"]),
            zeroing=tuple(Site(**each) for each in facts["zeroing"]),
            threads=facts["threads"],
            threads_site=_site(facts["threads_site"]),
            cpus=facts["cpus"],
            uses_cuda=facts["uses_cuda"],
            matmul_precision=facts["matmul_precision"],
        ),
        loader=None if document["loader"] is None else LoaderFacts.from_dict(document["loader"]),
    )


def _sited(document: Mapping[str, Any]) -> dict[str, Any]:
    return {**document, "site": _site(document["site"])}


def _site(document: Mapping[str, Any] | None) -> Site | None:
    return None if document is None else Site(**document)
