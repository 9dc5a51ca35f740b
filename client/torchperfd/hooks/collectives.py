"""Collectives: when the training thread comes to one, and how long it is held there.

Whatever Python calls is seen at torch's own narrow place, the methods of ``ProcessGroup`` and of
``Work``: so it is for ``torch.distributed``'s functions, FSDP, and what is built on either. The reducer
of ``DistributedDataParallel`` waits in C++ when a backward has computed all its gradients. That
moment is told by a callback of the autograd engine, queued by the backward's own root ahead of the
reducer's. On gloo the host waits; with NCCL it is the stream that does, which device events see.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.autograd

from torchperfd.hooks.context import HookContext
from torchperfd.hooks.frames import keep_out_of_graphs
from torchperfd.hooks.patches import Patches
from torchperfd.tape import Timed
from torchperfd.tape import events as on_tape

_C10D: Final = "torch._C._distributed_c10d"
_COMPILED_AUTOGRAD: Final = "torch._dynamo.compiled_autograd"

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
        self._backward: Callable[..., Any] = vars(torch.autograd)["backward"]
        # Made ahead of its use, which is where dynamo may watch.
        self._ahead_of_backward = self._make_backward()
        self._watches_backward = False
        # Reducers that are prepared for a backward which has not begun, by id: of several models, each
        # may have a backward of its own. And whether the root of one that has begun is yet to run.
        self._prepared: set[int] = set()
        self._under_way = False

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
        self._watch_reducers(c10d.Reducer)

    def _time(self, owner: Any, name: str) -> None:
        original = vars(owner)[name]
        timed = Timed(self._context.tape, original, on_tape.COLLECTIVE, on_tape.COLLECTIVE_END)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return timed(self, *args, **kwargs)

        self._patches.replace(owner, name, keep_out_of_graphs(_in_place_of(original, name, method)))

    # DDP.

    def _time_buffers(self) -> None:
        """Time how buffers are sent around ahead of a forward."""
        original = vars(torch.distributed)["_broadcast_coalesced"]
        timed = Timed(self._context.tape, original, on_tape.COLLECTIVE, on_tape.COLLECTIVE_END)

        @functools.wraps(original)
        def broadcast(*args: Any, **kwargs: Any) -> Any:
            return timed(*args, **kwargs)

        self._patches.replace(torch.distributed, "_broadcast_coalesced", keep_out_of_graphs(broadcast))

    def _watch_reducers(self, owner: Any) -> None:
        """Learn of each backward that a reducer takes part in: not those under ``no_sync()``."""
        original = vars(owner)["prepare_for_backward"]

        def method(reducer: Any, outputs: Any) -> Any:
            self._prepare(id(reducer))
            return original(reducer, outputs)

        replacement = _in_place_of(original, "prepare_for_backward", method)
        self._patches.replace(owner, "prepare_for_backward", keep_out_of_graphs(replacement))

    def _prepare(self, reducer: int) -> None:
        try:
            if self._context.tape.here():
                if not self._watches_backward:
                    self._watch_backward()
                self._prepared.add(reducer)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach training
            self._context.fault("collective", error)

    def _make_backward(self) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._prepared:
                self._begin(args[0] if args else kwargs.get("tensors"))
            return self._backward(*args, **kwargs)

        return keep_out_of_graphs(functools.update_wrapper(backward, self._backward))

    def _watch_backward(self) -> None:
        """From now on, go ahead of every backward; not earlier, since it is no use without DDP."""
        self._watches_backward = True
        self._backward = vars(torch.autograd)["backward"]
        self._patches.replace(torch.autograd, "backward", self._ahead_of_backward)

    def _begin(self, tensors: Any) -> None:
        """A backward begins, of these roots."""
        try:
            tape = self._context.tape
            if not tape.here():
                return
            self._prepared.pop()
            compiled = sys.modules.get(_COMPILED_AUTOGRAD)
            if tape.muted >> on_tape.BACKWARD & 1 or (compiled and compiled.compiled_autograd_enabled):
                return
            self._under_way = True
            for tensor in tensors if isinstance(tensors, (tuple, list)) else (tensors,):
                node = getattr(tensor, "grad_fn", None)
                if node is not None:
                    # No handle is kept: the hook goes with the graph, and a second time does nothing.
                    node.register_prehook(self._root_runs)
        except Exception as error:  # noqa: BLE001
            self._context.fault("collective", error)

    def _root_runs(self, _gradients: Any) -> None:
        """Only now, with the engine at work, does it take callbacks."""
        try:
            if self._under_way:
                self._under_way = False
                torch.autograd.Variable._execution_engine.queue_callback(self._computed)
        except Exception as error:  # noqa: BLE001
            self._context.fault("collective", error)

    def _computed(self) -> None:
        """All gradients are computed; the engine's next callback is the reducer's, which waits."""
        try:
            # The engine may call on a thread of its own, while the training thread waits for it.
            if self._context.tape.thread:
                self._context.tape.write(on_tape.REDUCTION)
        except Exception as error:  # noqa: BLE001
            self._context.fault("collective", error)


def _in_place_of(original: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with the looks of a method of a C++ class that Python may derive from.

    What such a class calls in C++ goes to Python and back. That it does not go round for ever depends
    on a Python frame of the method's name, whose first argument is the object.
    """
    functools.update_wrapper(function, original)
    function.__code__ = function.__code__.replace(co_name=name)
    return function
