"""What a trace shows of the run itself: training or inference, wrappers, compiled code, and CUDA graphs."""

import re
from functools import cached_property
from typing import Final, Literal

from torchperfd_daemon.analysis.advice.device_types import DeviceType, device_type
from torchperfd_daemon.analysis.categories import OPERATOR
from torchperfd_daemon.analysis.trace import Trace

Wrapper = Literal["DDP", "FSDP1", "FSDP2", "ZeRO", "DeepSpeed"]

_TRAINS: Final = re.compile(
    r"autograd::engine::|\w*Backward\d*$|Optimizer\.(?:step|zero_grad)#|.*\.py\(\d+\): backward$"
    r"|\W*backward\W*$|DistributedDataParallel\.backward",
)
_WRAPPERS: Final[dict[Wrapper, re.Pattern[str]]] = {
    "DDP": re.compile(
        r"DistributedDataParallel\.|torch::distributed::reducer::|torch\.distributed\.ddp\.reducer::"
        r"|nn\.Module: DistributedDataParallel"
    ),
    "FSDP1": re.compile(r"FullyShardedDataParallel\.|nn\.Module: FullyShardedDataParallel"),
    "FSDP2": re.compile(r"FSDP::|fsdp::|nn\.Module: FSDP[A-Z]"),
    "ZeRO": re.compile(r"Optimizer\.step#ZeroRedundancyOptimizer\."),
    "DeepSpeed": re.compile(
        r"Optimizer\.step#DeepSpeedZero|nn\.Module: DeepSpeedEngine|(?:.*/)?deepspeed/runtime/zero/"
    ),
}
_COMPILED: Final = re.compile(
    r"Torch-Compiled Region|## Call CompiledFxGraph|triton__0d"
    r"|(?:autograd::engine::evaluate_function: )?CompiledFunction"
    r"|triton_(?:poi|red|per|tem|for|unk|mm|spl|mix)_"
)
_GRAPH_LAUNCH: Final = re.compile(r"(?:cuda|cu|hip)GraphLaunch")


class RunFacts:
    """The facts of one run that advice depends on.

    Args:
        on_device: The trace has device events in its steps.
    """

    def __init__(self, trace: Trace, *, on_device: bool) -> None:
        self._trace = trace
        self._on_device = on_device

    @cached_property
    def trains(self) -> bool:
        """Whether a backward pass or an optimizer is in the file; otherwise the run is inference."""
        return bool(self._trace.backward.any()) or self._has(_TRAINS)

    @cached_property
    def wrappers(self) -> frozenset[Wrapper]:
        """The wrappers of distributed training that the file shows."""
        return frozenset(wrapper for wrapper, names in _WRAPPERS.items() if self._has(names))

    @cached_property
    def is_compiled(self) -> bool:
        """Whether code of ``torch.compile`` runs."""
        return self._has(_COMPILED)

    @cached_property
    def launches_graphs(self) -> bool:
        """Whether the run launches CUDA graphs."""
        return self._has(_GRAPH_LAUNCH)

    @cached_property
    def has_operators(self) -> bool:
        """Whether the host's operators are recorded."""
        return bool(self._trace.of_categories({OPERATOR}).any())

    @cached_property
    def device_type(self) -> DeviceType:
        """The kind of device that the steps run on."""
        return device_type(self._trace, on_device=self._on_device)

    def _has(self, names: re.Pattern[str]) -> bool:
        return any(names.match(name) for name in self._trace.names)
