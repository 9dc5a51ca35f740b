"""The optimizers of ``torch.optim``: which of them update all parameters at once, and on which devices.

`tests/unit/daemon/test_advice_settings.py` compares the table with the signatures of the installed torch.
"""

from dataclasses import dataclass
from typing import Final

_FOREACH_DEVICES: Final = frozenset({"cuda", "xpu", "mtia", "npu", ""})
_FUSED_DEVICES: Final = frozenset({"cuda", "xpu", "mtia", "mps", "cpu"})


@dataclass(frozen=True, slots=True)
class OptimizerClass:
    """The options of one class.

    Attributes:
        foreach: It has the option ``foreach``.
        fused_on: The types of devices on which its option ``fused`` works; empty without that option.
    """

    foreach: bool = False
    fused_on: frozenset[str] = frozenset()

    def option_for(self, device: str) -> str:
        """Return the option that updates all parameters at once on a type of device; empty without one."""
        if device in self.fused_on:
            return "fused=True"
        return "foreach=True" if self.foreach and device in _FOREACH_DEVICES else ""


_FOREACH: Final = OptimizerClass(foreach=True)
_BOTH: Final = OptimizerClass(foreach=True, fused_on=_FUSED_DEVICES)

TORCH_OPTIMIZERS: Final[dict[str, OptimizerClass]] = {
    "ASGD": _FOREACH,
    "Adadelta": _FOREACH,
    "Adafactor": _FOREACH,
    "Adagrad": OptimizerClass(foreach=True, fused_on=frozenset({"cuda", "cpu"})),
    "Adam": _BOTH,
    "AdamW": _BOTH,
    "Adamax": _FOREACH,
    "LBFGS": OptimizerClass(),
    "Muon": OptimizerClass(),
    "NAdam": _FOREACH,
    "RAdam": _FOREACH,
    "RMSprop": _FOREACH,
    "Rprop": _FOREACH,
    "SGD": _BOTH,
    "SparseAdam": OptimizerClass(),
}
