"""Reductions: since when a backward of ``DistributedDataParallel`` waits for the other ranks.

Its reducer does that in C++, once all gradients are computed, at the end of the backward. It also notes when
each gradient was ready: on gloo, where the host waits, that is read when the backward is over. With NCCL it
is the stream that waits, and a device event has to be put ahead of that. There a callback of the autograd
engine, queued by the backward's own root ahead of the reducer's, tells the moment when it has come.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.autograd

from torchperfd.hooks.backward_stats import find_stats
from torchperfd.hooks.context import HookContext
from torchperfd.hooks.frames import keep_out_of_graphs
from torchperfd.hooks.patches import Patches
from torchperfd.tape import NATIVE, Backward, Prepare
from torchperfd.tape import events as on_tape

_C10D: Final = "torch._C._distributed_c10d"
_COMPILED_AUTOGRAD: Final = "torch._dynamo.compiled_autograd"


class Reductions:
    """Learns of each backward that a reducer takes part in: not of those under ``no_sync()``."""

    def __init__(self, context: HookContext, patches: Patches, timed: Backward) -> None:
        self._context = context
        self._patches = patches
        self._timed = timed
        self._backward: Callable[..., Any] = timed
        # Made ahead of its use, which is where dynamo may watch.
        self._ahead_of_backward = self._make_backward()
        self._watches_backward = False
        # Reducers that are prepared for a backward which has not begun, by id: of several models, each
        # may have a backward of its own. And whether the root of one that has begun is yet to run.
        self._prepared: set[int] = set()
        self._under_way = False

    def install(self) -> None:
        """Be told of reducers; where torch has none, there is nothing to be told."""
        c10d = sys.modules.get(_C10D)
        if c10d is None:
            return
        if NATIVE:
            self._timed.find_stats = find_stats
        original = vars(c10d.Reducer)["prepare_for_backward"]
        told = functools.update_wrapper(Prepare(self._timed, original, self._prepare), original)
        self._patches.replace(c10d.Reducer, "prepare_for_backward", told)

    # Where there are device events.

    def _prepare(self, reducer: Any) -> None:
        try:
            if self._context.tape.here():
                if not self._watches_backward:
                    self._watch_backward()
                self._prepared.add(id(reducer))
        except BaseException as error:
            if not self._context.absorb("collective", error):
                raise

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
        except BaseException as error:
            if not self._context.absorb("collective", error):
                raise

    def _root_runs(self, _gradients: Any) -> None:
        """Only now, with the engine at work, does it take callbacks."""
        try:
            if self._under_way:
                self._under_way = False
                torch.autograd.Variable._execution_engine.queue_callback(self._computed)
        except BaseException as error:
            if not self._context.absorb("collective", error):
                raise

    def _computed(self) -> None:
        """All gradients are computed; the engine's next callback is the reducer's, which waits."""
        try:
            # The engine may call on a thread of its own, while the training thread waits for it.
            if self._context.tape.thread:
                self._context.tape.write(on_tape.REDUCTION)
        except BaseException as error:
            if not self._context.absorb("collective", error):
                raise
