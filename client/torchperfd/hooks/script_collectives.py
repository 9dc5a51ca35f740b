"""Collectives that the script starts itself, such as those of its metrics: how many, how long, at which line.

Those for gradients, buffers and parts of the model are torch's own, or belong to the model's forward, to a
backward or to an optimizer. What is left is found by the call stack: its innermost frame outside of
``torch.distributed``'s functions is a line of the script, or of a library that measures.
"""

import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final

from torchperfd.model.source_lines import TimedLine
from torchperfd.stacks.thread_frames import called_name, line_at

if TYPE_CHECKING:
    from torch import Tensor, nn

WAIT: Final = "wait"
BETWEEN_RANKS: Final = frozenset({"send", "recv", "recv_anysource"})
"""Methods of ``ProcessGroup`` that are no collectives."""

_PASSED: Final = frozenset(
    {"torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", "contextlib"}
)
"""Modules between a call of the script and a method of ``ProcessGroup``."""
_OF_THE_MODEL: Final = ("torch.nn", "torch.optim", "torch.autograd", "torch.utils", "torch.distributed")
_MEASURING: Final = ("torchmetrics", "torcheval", "ignite.metrics")
_TRAINING_STEP: Final = "training_step"
"""Lightning calls it within a forward, or within an optimizer's step."""
_MAX_FRAMES: Final = 200
_MAX_LINES: Final = 256
_MAX_TENSORS: Final = 64
_SIZES_READ: Final = 64
_REPORTED_LINES: Final = 8
_LONGEST_NAME: Final = 1000
_MAX_BYTES: Final = 64 << 10
"""Larger ones carry more than metrics: a script that averages gradients by itself needs them."""


@dataclass(slots=True)
class _Site:
    code: CodeType
    offset: int
    calls: int = 0
    ns: int = 0
    is_own: bool = True


class ScriptCollectives:
    """Counts and times them. Fixed memory, and about a microsecond for each."""

    def __init__(self) -> None:
        # By the id of a code object, which the site keeps alive: its hash takes longer than a collective.
        self._sites: dict[tuple[int, int], _Site] = {}
        self._models: Sequence[weakref.ref[nn.Module]] = ()

    def install(self, models: "Sequence[weakref.ref[nn.Module]]") -> None:
        """Begin.

        Args:
            models: Those that are trained; the collection may change.
        """
        self._models = models

    def note(self, name: str, arguments: tuple[Any, ...], began_ns: int) -> None:
        """A method of ``ProcessGroup`` or ``Work`` has returned; called by what replaces it.

        Args:
            name: The method's.
            arguments: Its own, without the object.
            began_ns: When it was called, on the performance counter.
        """
        took = perf_counter_ns() - began_ns
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__") in _PASSED:
            frame = frame.f_back
        if frame is None:
            return
        code, offset = frame.f_code, frame.f_lasti
        key = id(code), offset
        site = self._sites.get(key)
        if site is None:
            if len(self._sites) >= _MAX_LINES:
                return
            is_own = _is_of_script(frame) and not self._is_gradient(arguments)
            site = self._sites[key] = _Site(code, offset, is_own=is_own)
        if not site.is_own or name in BETWEEN_RANKS or not self._is_training():
            return
        if name != WAIT:
            site.calls += 1
            # Each size takes some microseconds to read.
            if (site.calls < _SIZES_READ or site.calls % _SIZES_READ == 0) and _bytes(arguments) > _MAX_BYTES:
                site.is_own = False
        site.ns += took

    def longest(self) -> tuple[TimedLine, ...]:
        """Return the lines with most time in such collectives, the longest first; on the flushing thread."""
        sites = [site for site in list(self._sites.values()) if site.is_own and site.ns]
        sites.sort(key=lambda site: -site.ns)
        return tuple(
            TimedLine(
                site.code.co_filename[-_LONGEST_NAME:],
                line_at(site.code, site.offset),
                called_name(site.code, site.offset).removeprefix("."),
                site.calls,
                site.ns,
            )
            for site in sites[:_REPORTED_LINES]
        )

    def _is_training(self) -> bool:
        """Return whether any model is in training mode; True while none is known."""
        known = False
        for reference in self._models:
            model = reference()
            if model is not None:
                if model.training:
                    return True
                known = True
        return not known

    def _is_gradient(self, arguments: tuple[Any, ...]) -> bool:
        """Return whether a call is for a model's gradients, or as many numbers; asked once for each line."""
        tensors = list(_tensors(arguments))
        places = {tensor.data_ptr() for tensor in tensors}
        total = sum(tensor.numel() for tensor in tensors)
        models = [model for reference in self._models if (model := reference()) is not None]
        for model in models:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            if trained and sum(parameter.numel() for parameter in trained) == total:
                return True
            gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
            if any(gradient.data_ptr() in places for gradient in gradients):
                return True
        return False


def _is_of_script(frame: FrameType) -> bool:
    """Return whether a call belongs to the script, and neither to a model's work nor to torch's own."""
    if _is_within(frame, ("torch",)):
        return False
    above: FrameType | None = frame
    for _ in range(_MAX_FRAMES):
        if above is None:
            return True
        if above.f_code.co_name == _TRAINING_STEP or _is_within(above, _MEASURING):
            return True
        if _is_within(above, _OF_THE_MODEL):
            return False
        above = above.f_back
    return False


def _is_within(frame: FrameType, packages: tuple[str, ...]) -> bool:
    module = str(frame.f_globals.get("__name__"))
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _bytes(arguments: tuple[Any, ...]) -> int:
    return sum(tensor.nbytes for tensor in _tensors(arguments))


def _tensors(arguments: tuple[Any, ...]) -> "Iterator[Tensor]":
    """Yield the tensors of a call, in lists of any depth as the methods take them; at most some."""
    parts, left = list(arguments[:2]), _MAX_TENSORS
    while parts and left:
        part, left = parts.pop(), left - 1
        if isinstance(part, (list, tuple)):
            parts += part[:_MAX_TENSORS]
        elif hasattr(part, "data_ptr"):
            yield part
