"""FLOPs: the floating-point operations of one training step.

torch counts them by a dispatch mode that sees every operator of the step. Its own mode,
``FlopCounterMode``, does not suit a step of the script: it hooks all modules, refuses
operators of higher order, makes ``torch.compile`` refuse, and an error in one of its formulas
is the script's. So here its formulas are used in a mode that only looks on.

Imports torch: to be imported once the script has, on the thread that trains.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from torchperfd.safety.interrupts import is_from_script

_ATTEMPTS: Final = 4

Formula = Callable[..., int]


class StepFlops:
    """Counts the operations of one training step. A ``StepWatcher``.

    The step it counts is some times slower, and computes the same, bit by bit.
    Nothing is counted within compiled code and within CUDA graphs, nor of operators that torch has
    no formula for: there, the truth is more. What activation checkpointing computes again counts.

    Args:
        first: Index of the first training step that may be counted. The steps before it show
            whether code is compiled.

    Attributes:
        flops: Operations of the step, a multiplication and an addition being two; None until
            they are counted.
        precision: In which most of them were computed: ``fp32``, ``tf32``, ``bf16``, ``fp16``, or
            torch's name of another type; empty until they are counted.
        reason: Why they will not be counted, in one line; empty while they may be.
    """

    def __init__(self, first: int = 2) -> None:
        self.flops: int | None = None
        self.precision = ""
        self.reason = ""
        self._first = first
        self._counter: _Counter | None = None
        self._attempts = 0

    @property
    def ended(self) -> bool:
        return self._counter is None and (self.flops is not None or bool(self.reason))

    def train_edge(self, next_index: int) -> None:
        """Begin to count, or read what was counted."""
        if self._counter is not None:
            self._conclude(self._counter)
        elif not self.ended and next_index >= self._first and self._attempts % 2 == 0:
            self._begin()

    def validate_edge(self) -> None:
        """Forget what was counted: it was no training step. Perhaps the next one is."""
        if self._counter is not None and self._leave(self._counter):
            self._attempts += 1
            if self._attempts == _ATTEMPTS:
                self.reason = "training and validation steps alternate too fast"
        # Half of the attempts begin here, for loops that validate after every training step; the
        # others do not, for those with many validation steps in a row.
        if self._counter is None and not self.ended and self._attempts % 2:
            self._begin()

    def abandon(self, reason: str) -> None:
        """Stop now: the loop is over, or this is a forked child. Another thread's is left alone."""
        if self.flops is None:
            self.reason = self.reason or reason
        if self._counter is not None:
            self._leave(self._counter)

    def _begin(self) -> None:
        self.reason = _unable()
        if self.reason:
            return
        try:
            self._counter = _Counter()
            self._counter.__enter__()  # type: ignore[no-untyped-call]
        except BaseException as error:
            self.reason = f"torch cannot count: {error}"
            counter, self._counter = self._counter, None
            if counter is not None and _get_current_dispatch_mode() is counter:
                counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if is_from_script(error):
                raise

    def _conclude(self, counter: "_Counter") -> None:
        if not self._leave(counter) or self.reason:
            return
        if _compiles():
            self.reason = _COMPILED
        elif counter.error:
            self.reason = f"torch cannot count {counter.error}"
        elif not counter.flops:
            self.reason = "no operator that torch can count has run in the step, outside of CUDA graphs"
        else:
            self.flops = sum(counter.flops.values())
            self.precision = _precision(max(counter.flops, key=lambda dtype: counter.flops[dtype]))

    def _leave(self, counter: "_Counter") -> bool:
        """Remove the mode if it is the topmost of this thread; else another one must be removed first."""
        if _get_current_dispatch_mode() is not counter:
            self.reason = self.reason or "another dispatch mode was begun within the step"
            return False
        self._counter = None
        try:
            counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        except BaseException as error:
            self.reason = f"torch cannot count: {error}"
            if is_from_script(error):
                if _get_current_dispatch_mode() is counter:
                    counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                raise
        return True


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes operators as they run, and adds up their FLOPs by type, with torch's formulas."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: dict[torch.dtype, int] = {}
        self.error = ""
        self._formulas = _formulas()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Otherwise dynamo does not compile while this mode is on, and never that frame again.
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(_stands_for_others(kind) for kind in types):
            # A DTensor, for one, stands for those of all ranks: what it does on this one comes by here.
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if FakeTensor in types:
            return out  # only asked what it would be, in order to place a DTensor
        formula = self._formulas.get(getattr(func, "_overloadpacket", func))
        if formula is not None:
            try:
                dtype = next(arg.dtype for arg in args if isinstance(arg, torch.Tensor))
                self.flops[dtype] = self.flops.get(dtype, 0) + int(formula(*args, **kwargs, out_val=out))
            except Exception as error:
                if is_from_script(error):
                    raise
                self.error = f"{func}: {error}"
        return out


def _stands_for_others(kind: type[torch.Tensor]) -> bool:
    """Return whether tensors of a class stand for others, by torch's protocol for such classes."""
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def _formulas() -> Mapping[Any, Formula]:
    known: dict[Any, Formula] = dict(flop_counter.flop_registry)
    aten = torch.ops.aten
    attention = known[aten._scaled_dot_product_flash_attention]
    here: dict[str, Formula] = {
        # torch's table has attention on GPUs only.
        "_scaled_dot_product_flash_attention_for_cpu": attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": known[
            aten._scaled_dot_product_flash_attention_backward
        ],
        # What autograd takes apart comes by whole in inference mode.
        "scaled_dot_product_attention": attention,
        "linear": _product,
        "matmul": _product,
        "conv1d": _convolution,
        "conv2d": _convolution,
        "conv3d": _convolution,
    }
    return {**{getattr(aten, name): formula for name, formula in here.items()}, **known}


def _product(left: torch.Tensor, *_: Any, out_val: torch.Tensor, **__: Any) -> int:
    return 2 * out_val.numel() * left.shape[-1]


def _convolution(_: Any, weight: torch.Tensor, *__: Any, out_val: torch.Tensor, **___: Any) -> int:
    return 2 * out_val.numel() * weight[0].numel()


_COMPILED: Final = "the script runs compiled code, in which nothing can be counted"


def _unable() -> str:
    if _compiles():
        return _COMPILED
    if not hasattr(TorchDispatchMode, "ignore_compile_internals"):
        return "this torch cannot count without being in the way of torch.compile; a newer one can"
    if _get_current_dispatch_mode() is not None:
        # It may end within the step, and would take ours off instead.
        return "a dispatch mode of the script's own is active"
    return ""


def _compiles() -> bool:
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)
    return bool(counters and counters.get("stats", {}).get("unique_graphs", 0))


def _precision(dtype: torch.dtype) -> str:
    try:
        fast = torch.get_float32_matmul_precision() != "highest"
    except RuntimeError as error:  # set partly in torch's old way, partly in its new one
        if is_from_script(error):
            raise
        fast = False
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    if dtype is torch.float32 and fast:
        return "tf32"
    return names.get(dtype, str(dtype).removeprefix("torch."))
