"""Collectives: when the training thread comes to one, and how long it is held there.

Whatever Python calls is seen at torch's own narrow place, the methods of ``ProcessGroup`` and of
``Work``: so it is for ``torch.distributed``'s functions, FSDP, and what is built on either. What
``DistributedDataParallel`` does in C++ is :mod:`~torchperfd.hooks.reductions`'.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from time import perf_counter_ns
from types import FunctionType
from typing import Any, Final

import torch.distributed

from torchperfd.events import Timed, codes
from torchperfd.hooks.context import HookContext, own_attribute
from torchperfd.hooks.frames import keep_classes_out_of_graphs, keep_out_of_graphs
from torchperfd.hooks.script_collectives import ScriptCollectives

_ISSUES: Final = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "monitored_barrier"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single", "send", "recv", "recv_anysource"),
)
"""The methods of ``ProcessGroup`` that communicate; each torch has some of them."""


def install(context: HookContext) -> None:
    """Time collectives and the waits for them; a torch without distributed has nothing to time."""
    if not torch.distributed.is_available():
        return
    keep_classes_out_of_graphs(ScriptCollectives)
    context.links.script_collectives.install(context.links.models.trained)
    group, work = torch.distributed.ProcessGroup, torch.distributed.Work
    _time_all(context, group, [name for name in _ISSUES if name in vars(group)])
    _time_all(context, work, ["wait"])


def _time_all(context: HookContext, base: Any, names: Iterable[str]) -> None:
    """Time methods of a class in C++, and of the classes that a script derives from it in Python.

    What such a class overrides never comes to the methods of the base. What it does not, C++ must find as it
    is without us: it takes a method in Python for the script's own and calls that, under either of its names.
    """
    originals = {name: own_attribute(base, name) for name in names}
    for name in names:
        _time(context, base, name)
    original = own_attribute(base, "__init__")
    seen: weakref.WeakSet[type] = weakref.WeakSet({base})

    def follow(kind: type) -> None:
        for each in reversed(_before(kind, base)):
            if each in seen:
                continue
            seen.add(each)
            order = _before(each, base) if issubclass(each, base) else ()
            for name, method in originals.items():
                if isinstance(vars(each).get(name), FunctionType):
                    _time(context, each, name)
                elif order and not any(name in vars(known) for known in order):
                    context.patches.add(each, name, method)

    def follow_all(kind: type) -> None:
        subclasses: list[type] = type.__subclasses__(kind)
        for each in subclasses:
            follow(each)
            follow_all(each)

    # Objects of these may exist already.
    follow_all(base)
    follow_safely = context.guard(follow, None)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if type(self) not in seen:
            follow_safely(type(self))

    context.patches.replace(base, "__init__", keep_out_of_graphs(init))


def _before(kind: type, base: type) -> tuple[type, ...]:
    """Return the classes in which Python looks for a method of one before its base."""
    return kind.__mro__[: kind.__mro__.index(base)]


def _time(context: HookContext, owner: Any, name: str) -> None:
    original = own_attribute(owner, name)
    buffer = context.buffer
    timed = Timed(buffer, original, codes.COLLECTIVE, codes.COLLECTIVE_END)
    note = context.links.script_collectives.note

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = perf_counter_ns()
        result = timed(self, *args, **kwargs)
        try:
            if buffer.here() and not buffer.muted >> codes.COLLECTIVE & 1:
                note(name, args, began)
        except BaseException as error:
            if not context.absorb(error, costs_step=False):
                raise
        return result

    context.patches.replace(owner, name, keep_out_of_graphs(_in_place_of(original, name, method)))


def _in_place_of(original: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with the looks of a method of a C++ class that Python may derive from.

    What such a class calls in C++ goes to Python and back. That it does not go round for ever depends
    on a Python frame of the method's name, whose first argument is the object.
    """
    functools.update_wrapper(function, original)
    function.__code__ = function.__code__.replace(co_name=name)
    return function
