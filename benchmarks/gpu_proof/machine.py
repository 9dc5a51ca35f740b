"""The machine that a check runs on, and how much work it is given there."""

import platform
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a check runs.

    Attributes:
        is_rehearsal: Without a GPU: the same code with little work, and nothing shown of a GPU.
    """

    is_rehearsal: bool

    @property
    def device(self) -> str:
        """Torch's name of the device that trains."""
        return "cpu" if self.is_rehearsal else "cuda"

    def amount(self, on_gpu: int, in_rehearsal: int) -> int:
        """Return how much of something to do here."""
        return in_rehearsal if self.is_rehearsal else on_gpu

    def autocast(self) -> torch.autocast:
        """Return autocast to bfloat16; off in a rehearsal, since many CPUs are far slower at it."""
        return torch.autocast(self.device, torch.bfloat16, enabled=not self.is_rehearsal)

    def wait(self) -> None:
        """Wait until the device has done all that was launched."""
        if not self.is_rehearsal:
            torch.cuda.synchronize()

    def describe(self) -> dict[str, str]:
        """Return what the results were measured with."""
        return {
            "device": "none (rehearsal)" if self.is_rehearsal else torch.cuda.get_device_name(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "cuda": str(torch.version.cuda or "none"),
        }
