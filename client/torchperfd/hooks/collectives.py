"""Collectives: when the training thread comes to one, and how long it is held there.

Whatever Python calls is seen at torch's own narrow place, the methods of ``ProcessGroup`` and of
``Work``: so it is for ``torch.distributed``'s functions, FSDP, and what is built on either. What
``DistributedDataParallel`` does in C++ is :mod:`~torchperfd.hooks.reductions`'.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from torchperfd.hooks.context import HookContext
from torchperfd.hooks.frames import keep_out_of_graphs
from torchperfd.hooks.patches import Patches
from torchperfd.tape import Timed
from torchperfd.tape import events as on_tape

_C10D: Final = "torch._C._distributed_c10d"

_ISSUES: Final = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "monitored_barrier"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single", "send", "recv", "recv_anysource"),
)
"""The methods of ``ProcessGroup`` that communicate; each torch has some of them."""


class Collectives:
    """Times collectives and the waits for them; costs nothing where there are none."""

    def __init__(self, context: HookContext, patches: Patches) -> None:
        self._context = context
        self._patches = patches

    def install(self) -> None:
        """Time what there is in this torch; one without distributed has nothing to time."""
        c10d = sys.modules.get(_C10D)
        if c10d is None:
            return
        for name in _ISSUES:
            if name in vars(c10d.ProcessGroup):
                self._time(c10d.ProcessGroup, name)
        self._time(c10d.Work, "wait")
        self._time_buffers()

    def _time(self, owner: Any, name: str) -> None:
        original = vars(owner)[name]
        timed = Timed(self._context.tape, original, on_tape.COLLECTIVE, on_tape.COLLECTIVE_END)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return timed(self, *args, **kwargs)

        self._patches.replace(owner, name, keep_out_of_graphs(_in_place_of(original, name, method)))

    def _time_buffers(self) -> None:
        """Time how DDP sends buffers around ahead of a forward."""
        original = vars(torch.distributed)["_broadcast_coalesced"]
        timed = Timed(self._context.tape, original, on_tape.COLLECTIVE, on_tape.COLLECTIVE_END)

        @functools.wraps(original)
        def broadcast(*args: Any, **kwargs: Any) -> Any:
            return timed(*args, **kwargs)

        self._patches.replace(torch.distributed, "_broadcast_coalesced", keep_out_of_graphs(broadcast))


def _in_place_of(original: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with the looks of a method of a C++ class that Python may derive from.

    What such a class calls in C++ goes to Python and back. That it does not go round for ever depends
    on a Python frame of the method's name, whose first argument is the object.
    """
    functools.update_wrapper(function, original)
    function.__code__ = function.__code__.replace(co_name=name)
    return function
