"""Settings of a DataLoader, and what each gave. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torchperfd.model.loader_workers import LoaderFacts

DEFAULT_PREFETCH: Final = 2
"""Of ``DataLoader``, for each worker."""


@dataclass(frozen=True, slots=True)
class LoaderSetting:
    """The arguments of a DataLoader that ``bench`` varies.

    Attributes:
        workers: ``num_workers``.
        batch_size: None leaves batches as the loader makes them.
        prefetch: ``prefetch_factor``; 0 without workers.
        pin_memory: As the argument.
        start_method: How workers start: ``fork``, ``spawn`` or ``forkserver``; empty for the loader's own.
        threads: ``torch.set_num_threads`` in the process that trains; 0 leaves it.
    """

    workers: int
    batch_size: int | None = None
    prefetch: int = 0
    pin_memory: bool = False
    start_method: str = ""
    threads: int = 0

    @property
    def cost(self) -> tuple[int, int, bool]:
        """What orders settings of equal speed: fewer workers first, then fewer batches ahead."""
        return self.workers, self.prefetch, self.pin_memory

    def code(self, own: "LoaderSetting | None" = None) -> str:
        """Return the setting as arguments of ``DataLoader``; of the batch size only what is not its own."""
        arguments = [f"num_workers={self.workers}"]
        if self.batch_size is not None and (own is None or own.batch_size != self.batch_size):
            arguments.insert(0, f"batch_size={self.batch_size}")
        if self.workers:
            if self.prefetch != DEFAULT_PREFETCH:
                arguments.append(f"prefetch_factor={self.prefetch}")
            arguments.append("persistent_workers=True")
        if self.workers and self.start_method:
            arguments.append(f'multiprocessing_context="{self.start_method}"')
        if self.pin_memory:
            arguments.append("pin_memory=True")
        code = f"DataLoader(..., {', '.join(arguments)})"
        return f"{code}, torch.set_num_threads({self.threads})" if self.threads else code


@dataclass(frozen=True, slots=True)
class Speed:
    """What a setting gave.

    Attributes:
        samples_per_second: Over all blocks of all rounds.
        spread: Half the distance between the quartiles of the blocks, as a part of the median; 0 to 1.
        batch_seconds: Time from one batch to the next.
        wait_seconds: What of it was spent waiting for the loader.
        start_seconds: Until the first batch was there.
        batches: Measured.
        batch_bytes: Of the tensors in one batch.
        loader: How the loop used its loader; None with workers.
    """

    samples_per_second: float
    spread: float
    batch_seconds: float
    wait_seconds: float
    start_seconds: float
    batches: int
    batch_bytes: int
    loader: LoaderFacts | None = None

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "Speed":
        """Return the speed of a document of ``dataclasses.asdict``."""
        loader = document["loader"]
        return cls(**{**document, "loader": None if loader is None else LoaderFacts.from_dict(loader)})


@dataclass(frozen=True, slots=True)
class RestOfStep:
    """What a training step takes without its input.

    Attributes:
        seconds: With batches that are in memory; or as predicted from the steps so far.
        predicted_seconds: Predicted from steps whose batches were made in the same process right before, less
            what such a step takes longer because of cold caches. None where it was not measured.
    """

    seconds: float
    predicted_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Unusable:
    """Why a setting gave nothing; one line."""

    reason: str


Outcome = Speed | Unusable


@dataclass(frozen=True, slots=True)
class LoaderDescription:
    """What the loader is like before anything is measured.

    Attributes:
        current: Its own setting.
        can_batch: Whether its batch size may be varied: it puts batches together itself.
        has_step: Whether the factory also gave the rest of a training step.
        cpus: CPUs that the process may use.
        has_device: Whether there is a CUDA device, for which memory may be pinned.
    """

    current: LoaderSetting
    can_batch: bool
    has_step: bool
    cpus: float
    has_device: bool
