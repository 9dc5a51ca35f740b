"""Changes of a training script that can be tried without editing it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

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
        values: Names and values of arguments.
    """

    target: str
    values: tuple[tuple[str, Any], ...] = ()

    @property
    def losses(self) -> str:
        """How losses must compare: ``exact``, ``batches`` (or else the same ones), ``close`` or ``any``."""
        return _LOSSES.get(self.target, ANY)

    @property
    def arguments(self) -> str:
        """The arguments as they are written."""
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
        """Return it as JSON has it."""
        return {"target": self.target, "values": dict(self.values)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "Change":
        """Return the change of a document of :meth:`to_dict`."""
        return cls(document["target"], tuple(document["values"].items()))


def change(target: str, **values: Any) -> Change:
    """Return a change with arguments by name."""
    return Change(target, tuple(values.items()))


def merged(kept: tuple[Change, ...], new: Change) -> tuple[Change, ...]:
    """Return the changes with one more, which replaces an earlier one of the same target."""
    return (*(each for each in kept if each.target != new.target), new)
