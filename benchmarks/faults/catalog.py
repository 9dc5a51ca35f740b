"""The faults and their labels, and the seeds and models that thresholds may be chosen on."""

import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from torchperfd_daemon.diagnosis.predictions import Removed
from torchperfd_daemon.diagnosis.verdict import Cause

HANG: Final = Cause.HANG.value
"""The class of faults after which no step ends."""

DEVELOPMENT_SEEDS: Final = (1, 2, 3)
DEVELOPMENT_MODELS: Final = ("mlp-ddp", "transformer-ddp", "transformer-fsdp2")
HELD_OUT_SEEDS: Final = (501, 502, 503)
HELD_OUT_MODELS: Final = ("convnet-ddp", "mlp-fsdp2", "convnet-fsdp2")
CPU: Final = "cpu"
"""Jobs on gloo, whose hosts wait for each other."""
SIMULATED: Final = "simulated"
"""Jobs on :mod:`benchmarks.simulated_device`, whose devices do."""
THROTTLED_GPU: Final = "throttled GPU"
NEEDLESS_SYNCHRONISATION: Final = "needless synchronisation"
WITH_NVML: Final = frozenset({THROTTLED_GPU, NEEDLESS_SYNCHRONISATION})
"""The faults of whose jobs NVML shows the GPUs."""
DEVELOPMENT_SPLIT_MODELS: Final = ("mlp-tp", "mlp-pp")
HELD_OUT_SPLIT_MODELS: Final = ("convnet-tp", "convnet-pp")
"""With tensor parallelism and in pipeline stages, for jobs on the simulated device."""
DEEP_MODEL: Final = "deep-ddp"
"""Many small layers, whose operations are short."""
OWN_MODELS: Final = frozenset({DEEP_MODEL})
"""Models that only certain faults need. They belong to both parts of the suite."""
MODELS: Final = (*DEVELOPMENT_MODELS, *DEVELOPMENT_SPLIT_MODELS, *HELD_OUT_MODELS, *HELD_OUT_SPLIT_MODELS)

STAGES: Final = 2
"""Of a pipeline; each has as many ranks, the first stage the lowest."""

RANKS: Final = 4
PACE_SECONDS: Final = 0.05
"""What a forward waits for, as it would for a device: many ranks then fit on few processors."""

USUAL_STEP_SECONDS: Final = 0.08
"""What a step takes on a machine with time for it. Where steps take longer, faults cost as much more."""

CHECKPOINT_STEPS: Final = 10
"""Rank 0 of every job writes a small checkpoint as often."""

RECOMPILE_STEPS: Final = 4
"""A job with that fault compiles as often."""

PERIOD_STEPS: Final = math.lcm(CHECKPOINT_STEPS, RECOMPILE_STEPS)
"""After so many steps a job has had everything in proportion."""

VALIDATION_STEPS: Final = 60
VALIDATION_BATCHES: Final = 10
"""What jobs that validate look at, as often."""

STEPS_TO_TELL: Final = 300
"""How many steps follow the onset under a tool that reports at the end of the run."""

ONSET_STEPS: Final = (140, 180)
"""Where a fault may begin. The steps before it are the run's healthy past."""

_JOB: Final = Path(__file__).with_name("job.py")
_SEVERITIES: Final = (0.8, 1.25)


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault.

    Attributes:
        name: As in the table; injections go by it.
        cause: The right answer: the value of a ``Cause``, or ``HANG``.
        culprits: How many ranks have it, chosen by the seed; 0: all alike, or it is no fault.
        seconds: What it adds to a culprit's step of usual length, in the mean; 0: not set but measured.
        last_culprit: The highest one; None: the last of the job.
        times_itself: Whether the job can time its injection; else the cost is the growth of the mean step.
        replicated_only: Whether it needs ``DistributedDataParallel``.
        pipelines_only: Whether it needs pipeline stages.
        whole_only: Whether each rank must be able to run its model by itself.
        least_ranks: How many the job has at least: among four, two that are slow are no minority.
        ranks: How many it has exactly; 0: as many as the suite's jobs.
        only_model: The model that its jobs need; empty: any that fits.
        from_start: Whether it is there from the first step, as settings are.
        grows: Whether it costs more with each step, so that only its newest steps count.
        onset_steps: Where it may begin, unless it is there from the start.
        pace_seconds: What a forward waits for.
        env: Variables in the environment of the ranks.
        work_seconds: Processor time that every rank uses in each step, for faults that take it away.
        in_quick: Whether ``--quick`` has it.
        devices: What its jobs run on.
        removed: What ``torchperfd whatif`` takes out of the steps to be without it; None where it cannot.
    """

    name: str
    cause: str
    culprits: int = 0
    seconds: float = 0.0
    last_culprit: int | None = None
    times_itself: bool = True
    replicated_only: bool = False
    pipelines_only: bool = False
    whole_only: bool = False
    least_ranks: int = 2
    ranks: int = 0
    only_model: str = ""
    from_start: bool = False
    grows: bool = False
    onset_steps: tuple[int, int] = ONSET_STEPS
    pace_seconds: float = PACE_SECONDS
    env: Mapping[str, str] = field(default_factory=dict)
    work_seconds: float = 0.0
    in_quick: bool = False
    devices: frozenset[str] = frozenset({CPU})
    removed: Removed | None = None

    def fits(self, model: str) -> bool:
        if self.only_model:
            return model == self.only_model
        if is_pipeline(model):
            return not (self.replicated_only or self.whole_only)
        return not self.pipelines_only and (not self.replicated_only or model.endswith("-ddp"))

    @property
    def is_control(self) -> bool:
        return self.cause == Cause.NONE.value

    @property
    def is_early(self) -> bool:
        """Whether a job has hardly trained before it, so that all evidence comes after its onset."""
        return self.from_start or self.onset_steps[1] < ONSET_STEPS[0]

    @property
    def hangs(self) -> bool:
        """Whether no step ends after its onset."""
        return self.cause == HANG

    @property
    def costs(self) -> bool:
        """Whether it makes every step longer, so that a cost can be right or wrong."""
        return not self.hangs and (self.seconds > 0 or not self.times_itself)

    @property
    def straggles(self) -> bool:
        """Whether the other ranks wait for some ranks in every step."""
        return self.costs and self.culprits > 0


_BOTH: Final = frozenset({CPU, SIMULATED})
_SIMULATED: Final = frozenset({SIMULATED})

FAULTS: Final = (
    Fault("healthy", Cause.NONE.value, in_quick=True, devices=_BOTH),
    Fault("healthy, validation", Cause.NONE.value, devices=_BOTH, whole_only=True),
    Fault("unbalanced pipeline", Cause.PIPELINE_IMBALANCE.value, devices=_SIMULATED, pipelines_only=True),
    Fault(
        "slow loader, one rank",
        Cause.INPUT_BOUND.value,
        1,
        0.04,
        in_quick=True,
        devices=_BOTH,
        removed=Removed.RANK_EXCESS,
    ),
    Fault("slow loader, all ranks", Cause.INPUT_BOUND.value, 0, 0.04, devices=_BOTH, removed=Removed.PHASE),
    Fault(
        "slow kernels, one rank",
        Cause.SLOW_RANK.value,
        1,
        0.03,
        in_quick=True,
        devices=_SIMULATED,
        removed=Removed.RANK_EXCESS,
    ),
    Fault(
        "slow kernels, two ranks",
        Cause.SLOW_RANK.value,
        2,
        0.03,
        least_ranks=6,
        devices=_SIMULATED,
        removed=Removed.SLOW_RANKS,
    ),
    Fault(
        "slow kernels, all ranks", Cause.UNKNOWN.value, 0, 0.03, devices=_SIMULATED, removed=Removed.GROWTH
    ),
    Fault(
        THROTTLED_GPU, Cause.GPU_THROTTLING.value, 1, 0.03, devices=_SIMULATED, removed=Removed.RANK_EXCESS
    ),
    Fault(
        NEEDLESS_SYNCHRONISATION,
        Cause.SYNCHRONISATION.value,
        times_itself=False,
        # The GPUs that NVML shows here idle in a pipeline's bubble, where real ones run NCCL's kernels.
        whole_only=True,
        devices=_SIMULATED,
    ),
    Fault(
        "background checkpoint",
        Cause.CHECKPOINT.value,
        1,
        last_culprit=0,
        times_itself=False,
        devices=_SIMULATED,
        removed=Removed.GROWTH,
    ),
    Fault(
        "collections at different steps",
        Cause.GARBAGE_COLLECTION.value,
        0,
        0.01,
        in_quick=True,
        devices=_SIMULATED,
        removed=Removed.GARBAGE_COLLECTION,
    ),
    Fault("slow exchange", Cause.COLLECTIVE.value, 0, 0.03, in_quick=True, devices=_SIMULATED),
    Fault(
        "slow compute, one rank", Cause.SLOW_RANK.value, 1, 0.03, in_quick=True, removed=Removed.RANK_EXCESS
    ),
    Fault(
        "slow compute, two ranks", Cause.SLOW_RANK.value, 2, 0.03, least_ranks=6, removed=Removed.SLOW_RANKS
    ),
    Fault("slow matmuls, one rank", Cause.SLOW_RANK.value, 1, 0.03, removed=Removed.RANK_EXCESS),
    Fault(
        "garbage collection",
        Cause.GARBAGE_COLLECTION.value,
        1,
        0.04,
        in_quick=True,
        devices=_BOTH,
        removed=Removed.RANK_EXCESS,
    ),
    Fault(
        "CPU hog",
        Cause.CPU_CONTENTION.value,
        1,
        times_itself=False,
        work_seconds=0.004,
        removed=Removed.GROWTH,
    ),
    Fault(
        "CPU quota",
        Cause.CGROUP_THROTTLING.value,
        1,
        times_itself=False,
        work_seconds=0.006,
        removed=Removed.GROWTH,
    ),
    Fault("slow disk", Cause.SLOW_IO.value, 1, 0.04, removed=Removed.RANK_EXCESS),
    Fault("memory leak", Cause.MEMORY_PRESSURE.value, 1),
    Fault(
        "slow collective",
        Cause.COLLECTIVE.value,
        0,
        0.03,
        replicated_only=True,
        in_quick=True,
        removed=Removed.GROWTH,
    ),
    Fault(
        "checkpoint stall",
        Cause.CHECKPOINT.value,
        1,
        0.04,
        last_culprit=0,
        in_quick=True,
        devices=_BOTH,
        removed=Removed.PHASE,
    ),
    Fault("one long checkpoint", Cause.CHECKPOINT.value, 1, last_culprit=0),
    Fault("recompiles", Cause.RECOMPILATION.value, 1, 0.02, removed=Removed.RANK_EXCESS),
    Fault("all slower", Cause.UNKNOWN.value, 0, 0.024, removed=Removed.GROWTH),
    Fault("stopped rank", HANG, 1, in_quick=True, devices=_BOTH),
    Fault("skipped collective", HANG, 1, in_quick=True, devices=_BOTH),
    Fault("mismatched collective", HANG, 1),
    Fault("dead worker", HANG, 1),
)
"""What a processor and a simulated device can show. GPUs that are shared have no fault here."""

SAVES_A_LOT: Final = Fault("saves a lot", Cause.NONE.value)
"""A control for a long run: checkpoints of all lengths, and validation that takes a minute."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One job: a fault, where and when, fixed by its seed.

    Attributes:
        culprits: Ranks; empty where all are alike.
        onset: Index of the first step with the fault.
        seconds: What it adds to a culprit's step of usual length.
        hang_line: The line of the job at which a culprit hangs; 0 when there is none.
        grows: Whether only the newest steps with the fault count.
        env: Variables in the environment of the ranks.
        hogs: Busy processes that share the machine with the job from its start to its end.
    """

    fault: str
    cause: str
    model: str
    seed: int
    ranks: int
    culprits: tuple[int, ...]
    onset: int
    seconds: float
    pace_seconds: float
    work_seconds: float
    hang_line: int
    device: str = CPU
    grows: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    hogs: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> "Plan":
        return cls(**{**document, "culprits": tuple(document["culprits"])})

    def has_fault(self, rank: int) -> bool:
        return not self.culprits or rank in self.culprits


def plan(fault: Fault, model: str, seed: int, ranks: int = RANKS, device: str = CPU) -> Plan:
    """Return the job of a seed; deterministic."""
    ranks = fault.ranks or max(ranks, fault.least_ranks)
    chance = random.Random(f"{fault.name}/{model}/{seed}/{ranks}")
    last = ranks - 1 if fault.last_culprit is None else fault.last_culprit
    culprits = chance.sample(range(last + 1), fault.culprits)
    onset = chance.randint(*fault.onset_steps)
    return Plan(
        fault=fault.name,
        cause=fault.cause,
        model=model,
        seed=seed,
        ranks=ranks,
        culprits=tuple(sorted(culprits)),
        onset=0 if fault.from_start else onset,
        seconds=fault.seconds * chance.uniform(*_SEVERITIES),
        pace_seconds=fault.pace_seconds,
        work_seconds=fault.work_seconds,
        hang_line=hang_line(fault.name),
        device=device,
        grows=fault.grows,
        env=fault.env,
    )


def plans(
    faults: list[Fault], seeds: list[int], models: list[str], ranks: int = RANKS, device: str = CPU
) -> list[Plan]:
    """Return each fault once with each seed, cycling through the models."""
    chosen = []
    for place, seed in enumerate(seeds):
        for number, fault in enumerate(faults):
            able = [fault.only_model] if fault.only_model else [each for each in models if fault.fits(each)]
            if able:
                chosen.append(plan(fault, able[(number + place) % len(able)], seed, ranks, device))
    return chosen


def models_of(device: str, *, held_out: bool) -> tuple[str, ...]:
    """Return the models of a part of the suite."""
    models = HELD_OUT_MODELS if held_out else DEVELOPMENT_MODELS
    split_models = HELD_OUT_SPLIT_MODELS if held_out else DEVELOPMENT_SPLIT_MODELS
    return (*models, *split_models) if device == SIMULATED else models


def is_pipeline(model: str) -> bool:
    return model.endswith("-pp")


def hang_line(name: str) -> int:
    mark = f"# hangs: {name}"
    lines = _JOB.read_text().splitlines()
    return next((number for number, line in enumerate(lines, start=1) if line.endswith(mark)), 0)


def split(seed: int, model: str) -> str:
    """Return which part of the suite a job belongs to: thresholds may be chosen on development jobs only."""
    is_own = model in OWN_MODELS
    if seed in HELD_OUT_SEEDS and (is_own or model in models_of(SIMULATED, held_out=True)):
        return "held out"
    if seed in DEVELOPMENT_SEEDS and (is_own or model in models_of(SIMULATED, held_out=False)):
        return "development"
    return "mixed"
