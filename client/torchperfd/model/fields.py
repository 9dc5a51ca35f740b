"""Per-rank measurements other than phases: one table, which metrics, their values, help and docs follow."""

from dataclasses import dataclass
from typing import Any, Final, Literal


@dataclass(frozen=True, slots=True)
class Field:
    """One number of a rank.

    Attributes:
        metric: Name of its metric, without the prefix ``torchperfd_`` and, of a counter, without ``_total``.
        kind: A counter only grows while its process lives.
        unit: Of the metric; the base unit.
        help: What it is, as one sentence.
        report: Its path in a rank of the ``torchperfd.run/1`` document; empty if it has none.
        totals: Its path in a rank's totals, whose nanoseconds are seconds here; empty if it is computed.
    """

    metric: str
    kind: Literal["counter", "gauge"]
    unit: str
    help: str
    report: str = ""
    totals: str = ""

    def value(self, totals: Any) -> float | None:
        """Return its value in a rank's totals; None where a part of its path is None."""
        found = totals
        for name in self.totals.split("."):
            found = getattr(found, name)
            if found is None:
                return None
        return float(found / 1e9 if self.totals.endswith(".ns") else found)

    @property
    def series(self) -> str:
        """Its name on a metrics page, without the prefix."""
        return f"{self.metric}_total" if self.kind == "counter" else self.metric


STEPS: Final = Field("train_steps", "counter", "steps", "Training steps.", "train.steps", "train.steps")
STEP_SECONDS: Final = Field(
    "train_step_seconds",
    "counter",
    "seconds",
    "Time in training steps.",
    "train.step_seconds_total",
    "train.ns",
)
SAMPLES: Final = Field(
    "train_samples", "counter", "samples", "Samples trained on.", "train.samples", "train.samples"
)
TOKENS: Final = Field(
    "train_tokens", "counter", "tokens", "Tokens trained on, if the script reports them.", "train.tokens"
)
MICRO_BATCHES: Final = Field(
    "train_micro_batches", "counter", "batches", "Batches that went backward.", "train.micro_batches"
)
SKIPPED: Final = Field(
    "train_skipped_optimizer_steps",
    "counter",
    "steps",
    "Optimizer steps that were called off: refused by a GradScaler, or their gradients zeroed unused.",
    "train.skipped",
)
VALIDATE_STEPS: Final = Field(
    "train_validate_steps", "counter", "steps", "Validation steps.", "validate.steps", "validate.steps"
)
CHECKPOINT_SECONDS: Final = Field(
    "train_checkpoint_seconds",
    "counter",
    "seconds",
    "Time of saves between steps; that of saves within a step is its phase checkpoint.",
    "checkpoint.seconds_total",
    "checkpoint.ns",
)
BACKGROUND_SAVE_SECONDS: Final = Field(
    "train_background_save_seconds",
    "counter",
    "seconds",
    "Time for which a checkpoint was being saved in the background, beside the steps.",
    "background_saves.seconds_total",
)
SYNC_WAIT_SECONDS: Final = Field(
    "train_sync_wait_seconds",
    "counter",
    "seconds",
    "Time in training steps for which the host waited for the device in calls such as item(), by samples.",
    "sync_waits",
)
GC_SECONDS: Final = Field(
    "train_gc_seconds",
    "counter",
    "seconds",
    "Pauses of Python's garbage collector, from the first step on.",
    "gc",
)
READY_BATCHES: Final = Field(
    "train_dataloader_ready_batches",
    "gauge",
    "batches",
    "Batches that waited in the loader's workers at the newest draw; 0 when they starve.",
    "loader_ready_batches",
    "loader_ready",
)
CUDA_ALLOCATED: Final = Field(
    "train_cuda_allocated_bytes",
    "gauge",
    "bytes",
    "Device memory of tensors.",
    "cuda.allocated_bytes",
    "cuda.allocated_bytes",
)
CUDA_RESERVED: Final = Field(
    "train_cuda_reserved_bytes",
    "gauge",
    "bytes",
    "Device memory that torch keeps.",
    "cuda.reserved_bytes",
    "cuda.reserved_bytes",
)
CUDA_PEAK: Final = Field(
    "train_cuda_peak_bytes",
    "gauge",
    "bytes",
    "Most device memory that tensors ever had.",
    "cuda.peak_bytes",
    "cuda.peak_bytes",
)
HOST_MEMORY: Final = Field(
    "train_host_memory_bytes",
    "gauge",
    "bytes",
    "Resident memory of the training process, without its workers.",
    "host_memory.resident_bytes",
    "host_memory.resident_bytes",
)
STEP_FLOPS: Final = Field(
    "train_step_flops",
    "gauge",
    "operations",
    "Floating-point operations of a training step.",
    "flops_per_step",
)
FLOPS_UTILIZATION: Final = Field(
    "train_model_flops_utilization_ratio",
    "gauge",
    "ratio",
    "Part of the device's peak that recent training steps make use of (MFU).",
    "model_flops_utilization",
)
OVERHEAD: Final = Field(
    "client_overhead_ratio",
    "gauge",
    "ratio",
    "Cost of the client as a part of the time of training.",
    "overhead_ratio",
    "overhead",
)
SHED_TIERS: Final = Field(
    "client_shed_tiers",
    "gauge",
    "tiers",
    "Tiers of detail that the client has given up to keep within the overhead allowed.",
    "shed_tiers",
)

STEP_FIELDS: Final = (STEPS, STEP_SECONDS, SAMPLES, TOKENS, MICRO_BATCHES, SKIPPED, VALIDATE_STEPS)
"""Counted with every step."""
OTHER_FIELDS: Final = (
    CHECKPOINT_SECONDS,
    BACKGROUND_SAVE_SECONDS,
    SYNC_WAIT_SECONDS,
    GC_SECONDS,
    READY_BATCHES,
    CUDA_ALLOCATED,
    CUDA_RESERVED,
    CUDA_PEAK,
    HOST_MEMORY,
    STEP_FLOPS,
    FLOPS_UTILIZATION,
    OVERHEAD,
    SHED_TIERS,
)
"""Measured beside the steps."""
FIELDS: Final = STEP_FIELDS + OTHER_FIELDS
