"""Forward passes of the models that were found, and backward passes with their wait for other ranks.

Forwards are also timed after ``model.compile()`` and in replicas.

The reducer of ``DistributedDataParallel`` waits in C++ at the end of the backward, once all gradients are
computed. It also records when each gradient was ready. With gloo, where the host waits, these times are read
after the backward. With NCCL the stream waits, and a device event must be recorded before that: the autograd
engine calls back when all gradients are computed. The backward's root queues this callback ahead of the
reducer's.
"""

import functools
import sys
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.autograd
import torch.distributed
from torch import nn

from torchperfd.events import Forward, Timed, codes
from torchperfd.hooks.context import HookContext, HookUnavailableError, own_attribute
from torchperfd.hooks.patches import Patches, keep_classes_out_of_graphs, keep_out_of_graphs

CALL_METHOD = "_call_impl"
CALL_ATTRIBUTE = "_compiled_call_impl"
"""What torch calls instead of a module's own call, where it has been compiled in place.

Ours calls what was there. Unlike hooks it is left out where a module is pickled or copied, costs a module
without hooks no detour, and is not traced into graphs.
"""


def install_forward(context: HookContext) -> None:
    """Time the forward of every model that is found from now on."""
    # What reads the place, and what is called in the end.
    for name in (CALL_ATTRIBUTE, "_wrapped_call_impl", CALL_METHOD):
        own_attribute(nn.Module, name)

    def time(model: nn.Module) -> None:
        forward = Forward(
            context.buffer,
            model,
            vars(model).get(CALL_ATTRIBUTE),
            CALL_METHOD,
            torch.is_grad_enabled,
            codes.FORWARD,
            codes.EVALUATE,
            codes.FORWARD_END,
        )
        context.patches.replace_own(model, CALL_ATTRIBUTE, forward)

    context.links.time_forward = context.guard(time, None)


def install_compiled_models(context: HookContext) -> None:
    """Time the forward of a known model again once it has been compiled in place."""
    compile_in_place = own_attribute(nn.Module, "compile")

    @functools.wraps(compile_in_place)
    def compile(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        compile_in_place(module, *args, **kwargs)
        try:
            time = context.links.time_forward
            if context.active and time is not None and context.links.models.is_known(module):
                time(module)
        except BaseException as error:
            if not context.absorb(error, costs_step=False):
                raise

    context.patches.replace(nn.Module, "compile", keep_out_of_graphs(compile))


def install_replicas(context: HookContext) -> None:
    """Take the timed call off every replica: it would call the original."""
    replicate = own_attribute(nn.Module, "_replicate_for_data_parallel")

    @functools.wraps(replicate)
    def replicated(module: nn.Module) -> Any:
        replica = replicate(module)
        try:
            if isinstance(vars(replica).get(CALL_ATTRIBUTE), Forward):
                del vars(replica)[CALL_ATTRIBUTE]
        except BaseException as error:
            if not context.absorb(error, costs_step=False):
                raise
        return replica

    context.patches.replace(nn.Module, "_replicate_for_data_parallel", keep_out_of_graphs(replicated))


def install_modes(context: HookContext) -> None:
    """Note every ``eval()`` of a model that is trained, and the ``train()`` that follows it.

    ``Module.train`` calls itself for every module within, in some loops once a step. So it is replaced only
    while a model evaluates.
    """
    buffer, models = context.buffer, context.links.models
    compiling = torch.compiler.is_dynamo_compiling
    evaluate, train = own_attribute(nn.Module, "eval"), own_attribute(nn.Module, "train")
    meanwhile = Patches()

    def begins(module: nn.Module) -> None:
        try:
            if context.active and buffer.here() and is_whole_model(module, models.trained):
                meanwhile.undo()
                meanwhile.replace(nn.Module, "train", train_noted)
                buffer.mark(codes.EVALUATION_MODE)
        except BaseException as error:
            if not context.absorb(error, costs_step=False):
                raise

    def ends(module: nn.Module) -> None:
        try:
            if buffer.here() and is_whole_model(module, models.trained):
                meanwhile.undo()
                buffer.mark(codes.TRAINING_MODE)
        except BaseException as error:
            if not context.absorb(error, costs_step=False):
                raise

    @functools.wraps(evaluate)
    def eval_noted(self: Any) -> Any:
        if not compiling():
            begins(self)
        return evaluate(self)

    @functools.wraps(train)
    def train_noted(self: Any, mode: bool = True) -> Any:
        if mode and not compiling():
            ends(self)
        return train(self, mode)

    for function in (begins, ends, is_whole_model):
        keep_out_of_graphs(function)
    for replacement in (eval_noted, train_noted):
        keep_out_of_graphs(replacement, inline=True)
    context.patches.replace(nn.Module, "eval", eval_noted)
    context.handles.append(SimpleNamespace(remove=meanwhile.undo))


def is_whole_model(module: nn.Module, trained: "list[Any]") -> bool:
    """Return whether a module is a model that is trained, what a wrapper of one holds, or a wrapper.

    Args:
        trained: Weak references to the models.
    """
    for reference in trained:
        model = reference()
        if model is None:
            continue
        if model is module or any(child is model for child in module.children()):
            return True
        # A part alone may be frozen, and then stays in evaluation mode while the whole trains.
        if any(child is module for child in model.children()):
            return sum(1 for _ in module.parameters()) == sum(1 for _ in model.parameters())
    return False


_NOTHING: Final[tuple[None, list[int]]] = (None, [])

Pending = dict[int, tuple["weakref.ref[Any]", int, int]]
"""Reducers that are prepared for a backward, by id: the reducer, and from when to when that took (ns)."""


class GradientTimes:
    """Reads from reducers when each of their gradients was ready.

    A reducer notes this by itself, in nanoseconds since it was prepared for the backward. From the last
    gradient on, the backward waits for the other ranks.
    """

    def __init__(self) -> None:
        # References without callbacks: Python drops what a signal handler raises within one.
        self._pending: Pending = {}
        # How late each gradient was in the newest backward. No two backwards agree in all of them, to the
        # nanosecond: where a reducer repeats them, it had no part in the backward.
        self._newest: dict[int, tuple[weakref.ref[Any], list[int]]] = {}

    @property
    def remembered_count(self) -> int:
        """The number of reducers whose newest times are kept."""
        return len(self._newest)

    def note_prepared(self, reducer: Any, began_ns: int) -> None:
        """Note that a reducer has been prepared, and began to count, between ``began_ns`` and now."""
        self._pending[id(reducer)] = weakref.ref(reducer), began_ns, time.perf_counter_ns()

    def take_pending(self) -> Pending:
        """Return the reducers that are prepared. A backward within the backward then finds none."""
        pending = self._pending
        if pending:
            self._pending = {}
        return pending

    def last_ready(self, pending: Pending, began_ns: int) -> int | None:
        """Return when the last gradient of a backward was ready, in ns; None if no reducer took part in it.

        Args:
            pending: The reducers that were prepared before it. Those of other models, whose backward is yet
                to come, are pending again afterwards.
            began_ns: When the backward began.
        """
        last = None
        for own, (reference, earliest, latest) in pending.items():
            reducer = reference()
            if reducer is None:
                continue
            times = reducer.get_backward_stats()
            known, newest = self._newest.get(own, _NOTHING)
            # A reducer has one reference for as long as that is kept.
            is_known = known is reference
            if times and times == (newest if is_known else [0] * len(times)):
                self._pending.setdefault(own, (reference, earliest, latest))
                continue
            if not is_known or len(self._newest) > 1:
                self._newest = {other: seen for other, seen in self._newest.items() if seen[0]() is not None}
            self._newest[own] = reference, times
            if times:
                final = max(times)
                if latest + final >= began_ns:
                    last = max(earliest + final, began_ns, last or 0)
        return last


def install_backward(context: HookContext) -> None:
    """Time ``torch.autograd.backward``, which ``Tensor.backward`` calls."""
    original = own_attribute(torch.autograd, "backward")
    timed = Timed(context.buffer, original, codes.BACKWARD, codes.BACKWARD_END)
    functools.update_wrapper(timed, original)
    context.patches.replace(torch.autograd, "backward", timed)
    context.links.backward = timed


_COMPILED_AUTOGRAD: Final = "torch._dynamo.compiled_autograd"


def install_reductions(context: HookContext) -> None:
    """Watch reducers be prepared; a torch without distributed training has none."""
    if not torch.distributed.is_available():
        return
    timed = context.links.backward
    if timed is None:
        raise HookUnavailableError("the hook backward is off")
    keep_classes_out_of_graphs(Reductions, GradientTimes)
    reductions = Reductions(context, timed)
    reducer: Any = own_attribute(torch.distributed, "Reducer")
    original = own_attribute(reducer, "prepare_for_backward")

    def prepare_for_backward(reducer: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter_ns()
        result = original(reducer, *args, **kwargs)
        reductions.note_prepared(reducer, began)
        return result

    replacement = keep_out_of_graphs(functools.update_wrapper(prepare_for_backward, original))
    context.patches.replace(reducer, "prepare_for_backward", replacement)


class Reductions:
    """Finds the backwards in which a reducer waits: not those under ``no_sync()``."""

    def __init__(self, context: HookContext, timed: Timed) -> None:
        self._context = context
        self._timed = timed
        self._times = GradientTimes()
        # Made before it is used, because dynamo may watch by then.
        self._backward = self._make_backward()
        # With CUDA event ids: the reducers that are prepared for a backward which has not begun, by id.
        # Each of several models may have a backward of its own. And whether the root of one that has begun is
        # yet to run.
        self._prepared: set[int] = set()
        self._under_way = False

    def note_prepared(self, reducer: Any, began: int) -> None:
        """A reducer has been prepared for a backward since ``began``, in ns."""
        try:
            buffer = self._context.buffer
            if not buffer.here() or buffer.muted >> codes.BACKWARD & 1:
                return
            self._timed.original = self._backward  # not earlier: without DDP it is of no use
            if buffer.cuda_event_id is None:
                self._times.note_prepared(reducer, began)
            else:
                self._prepared.add(id(reducer))
        except BaseException as error:
            if not self._context.absorb(error, costs_step=False):
                raise

    def _make_backward(self) -> Callable[..., Any]:
        original = self._timed.original
        here, take_pending = self._context.buffer.here, self._times.take_pending

        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._prepared:
                self._begin(args[0] if args else kwargs.get("tensors"))
            # Little Python: at each step it runs with caches that training has emptied, ten times as long.
            pending = take_pending() if here() else None
            if not pending:
                return original(*args, **kwargs)
            began = time.perf_counter_ns()
            result = original(*args, **kwargs)
            self._write_wait(pending, began)
            return result

        return keep_out_of_graphs(functools.update_wrapper(backward, original))

    # On gloo.

    def _write_wait(self, pending: Pending, began: int) -> None:
        """A backward is over: write since when it has waited, if it did."""
        try:
            buffer = self._context.buffer
            ready = self._times.last_ready(pending, began)
            if ready is not None and not buffer.muted >> codes.BACKWARD & 1:
                buffer.mark(codes.REDUCTION, max(0, time.perf_counter_ns() - ready))
        except BaseException as error:
            if not self._context.absorb(error, costs_step=False):
                raise

    # With CUDA event ids.

    def _begin(self, tensors: Any) -> None:
        try:
            buffer = self._context.buffer
            if not buffer.here():
                return
            self._prepared.pop()
            compiled = sys.modules.get(_COMPILED_AUTOGRAD)
            if buffer.muted >> codes.BACKWARD & 1 or (compiled and compiled.compiled_autograd_enabled):
                return
            self._under_way = True
            for tensor in tensors if isinstance(tensors, (tuple, list)) else (tensors,):
                node = getattr(tensor, "grad_fn", None)
                if node is not None:
                    # No handle is kept: the hook goes with the graph, and a second time does nothing.
                    node.register_prehook(self._root_runs)
        except BaseException as error:
            if not self._context.absorb(error, costs_step=False):
                raise

    def _root_runs(self, _gradients: Any) -> None:
        """Only now, with the engine at work, does it take callbacks."""
        try:
            if self._under_way:
                self._under_way = False
                torch.autograd.Variable._execution_engine.queue_callback(self._computed)
        except BaseException as error:
            if not self._context.absorb(error, costs_step=False):
                raise

    def _computed(self) -> None:
        """All gradients are computed; the engine's next callback is the reducer's, which waits."""
        try:
            # The engine may call on a thread of its own, while the training thread waits for it.
            if self._context.buffer.thread:
                self._context.buffer.write(codes.REDUCTION)
        except BaseException as error:
            if not self._context.absorb(error, costs_step=False):
                raise
