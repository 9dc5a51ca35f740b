"""Collectives, and the rank's place in its job.

A collective has the time at which the training thread enters it, and how long it is held there. Calls from
Python, such as those of ``torch.distributed`` and FSDP, pass through the methods of ``ProcessGroup`` and
``Work``. Functional collectives, which tensor parallelism uses, wait in a C++ operator instead. The reducer
of ``DistributedDataParallel`` is hooked in :mod:`torchperfd.hooks.passes`, and the broadcast of its buffers
here.

The place comes from device meshes, pipeline stages and layers split by tensor parallelism. Meshes without
dimension names are covered by the stages and the split layers.

Nothing of this module is used where torch is built without distributed training.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from time import perf_counter_ns
from types import FunctionType
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor

from torchperfd.events import Timed, codes
from torchperfd.hooks.context import HookContext, own_attribute
from torchperfd.hooks.line_times import ScriptCollectives
from torchperfd.hooks.patches import keep_classes_out_of_graphs, keep_out_of_graphs
from torchperfd.hooks.process_groups import UNNAMED
from torchperfd.model.process import Coordinate

_ISSUES: Final = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "monitored_barrier"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single", "send", "recv", "recv_anysource"),
)
"""The methods of ``ProcessGroup`` that communicate; each torch has some of them."""


def install_collectives(context: HookContext) -> None:
    keep_classes_out_of_graphs(ScriptCollectives)
    context.links.script_collectives.install(context.links.models.trained)
    group, work = torch.distributed.ProcessGroup, torch.distributed.Work
    _time_methods(context, group, [name for name in _ISSUES if name in vars(group)])
    _time_methods(context, work, ["wait"])


def _time_methods(context: HookContext, base: Any, names: Iterable[str]) -> None:
    """Time methods of a class in C++, and of the classes that a script derives from it in Python.

    What such a class overrides never comes to the methods of the base. What it does not, C++ must find as it
    is without us: it takes a method in Python for the script's own and calls that, under either of its names.
    """
    originals = {name: own_attribute(base, name) for name in names}
    for name in names:
        _time_method(context, base, name)
    original = own_attribute(base, "__init__")
    seen: weakref.WeakSet[type] = weakref.WeakSet({base})

    def follow(kind: type) -> None:
        for each in reversed(_classes_before(kind, base)):
            if each in seen:
                continue
            seen.add(each)
            order = _classes_before(each, base) if issubclass(each, base) else ()
            for name, method in originals.items():
                if isinstance(vars(each).get(name), FunctionType):
                    _time_method(context, each, name)
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


def _classes_before(kind: type, base: type) -> tuple[type, ...]:
    """Return the classes in which Python looks for a method of one before its base."""
    return kind.__mro__[: kind.__mro__.index(base)]


def _time_method(context: HookContext, owner: Any, name: str) -> None:
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


_FUNCTIONAL_MODULE: Final = "torch.distributed._functional_collectives"


def install_functional_collectives(context: HookContext) -> None:
    """Time ``wait_tensor``, now or once the script has imported its module, which takes long by itself."""
    context.when_imported(_FUNCTIONAL_MODULE, lambda: _time_waits(context))


def _time_waits(context: HookContext) -> None:
    module = sys.modules[_FUNCTIONAL_MODULE]
    original = own_attribute(module, "wait_tensor")
    timed = Timed(context.buffer, original, codes.COLLECTIVE, codes.COLLECTIVE_END)

    @functools.wraps(original)
    def wait_tensor(tensor: Tensor) -> Tensor:
        # Compiled code has the operator in its graph, as it has without us.
        waited: Tensor = original(tensor) if torch.compiler.is_compiling() else timed(tensor)
        return waited

    context.patches.replace(module, "wait_tensor", keep_out_of_graphs(wait_tensor, inline=True))


def install_ddp_buffers(context: HookContext) -> None:
    """Time the broadcast of a model's buffers."""
    original = own_attribute(torch.distributed, "_broadcast_coalesced")
    timed = Timed(context.buffer, original, codes.COLLECTIVE, codes.COLLECTIVE_END)

    @functools.wraps(original)
    def broadcast(*args: Any, **kwargs: Any) -> Any:
        return timed(*args, **kwargs)

    context.patches.replace(torch.distributed, "_broadcast_coalesced", keep_out_of_graphs(broadcast))


def after_making(context: HookContext, made: type, note: Callable[[Any], None]) -> None:
    """Call ``note`` with each instance of a class that is made from now on; not within compiled code.

    Raises:
        HookUnavailableError: The class has no ``__init__`` of its own.
    """
    original = own_attribute(made, "__init__")
    note_safely = context.guard(note, None)

    @functools.wraps(original)
    def init(instance: Any, *args: Any, **kwargs: Any) -> None:
        original(instance, *args, **kwargs)
        if not torch.compiler.is_compiling():
            note_safely(instance)

    context.patches.replace(made, "__init__", keep_out_of_graphs(init, inline=True))


_MESH_MODULE: Final = "torch.distributed.device_mesh"


def install_device_meshes(context: HookContext) -> None:
    """Look at every ``DeviceMesh`` that is made, from now on or once the script has imported it."""
    places = context.links.places

    def note(mesh: Any) -> None:
        names, coordinate = mesh.mesh_dim_names, mesh.get_coordinate()
        if names and coordinate:
            for number, (name, rank) in enumerate(zip(names, coordinate, strict=True)):
                places[name] = Coordinate(name, rank, mesh.size(number))

    def follow() -> None:
        after_making(context, own_attribute(sys.modules[_MESH_MODULE], "DeviceMesh"), note)

    context.when_imported(_MESH_MODULE, follow)


_STAGE_MODULE: Final = "torch.distributed.pipelining.stage"
_PIPELINE_DIMENSION: Final = "pp"


def install_pipeline_stages(context: HookContext) -> None:
    """Look at every stage that is made, from now on or once the script has imported the pipelines."""
    places = context.links.places

    def note(stage: Any) -> None:
        place = Coordinate(_PIPELINE_DIMENSION, stage.group_rank, stage.group_size)
        named = {(each.rank, each.size) for each in places.values()}
        # A mesh of one dimension, over all ranks, has the unnamed group of them all.
        if getattr(stage.group, "group_desc", "") in UNNAMED and (place.rank, place.size) not in named:
            places[_PIPELINE_DIMENSION] = place

    def follow() -> None:
        # Of both kinds of stages: those made by hand, and those of a model that torch has split.
        after_making(context, own_attribute(sys.modules[_STAGE_MODULE], "_PipelineStageBase"), note)

    context.when_imported(_STAGE_MODULE, follow)


_STYLE_MODULE: Final = "torch.distributed.tensor.parallel.style"
_SPLIT_STYLES: Final = ("ColwiseParallel", "RowwiseParallel")
_TENSOR_DIMENSION: Final = "tp"


def install_tensor_parallel(context: HookContext) -> None:
    """Look at every layer that is split, from now on or once the script has imported what splits them."""
    context.when_imported(_STYLE_MODULE, lambda: _follow_styles(context))


def _follow_styles(context: HookContext) -> None:
    places = context.links.places

    def note(mesh: Any) -> None:
        # Of a mesh with names, the dimensions are known by them.
        if not mesh.mesh_dim_names and mesh.ndim == 1:
            places[_TENSOR_DIMENSION] = Coordinate(_TENSOR_DIMENSION, mesh.get_local_rank(), mesh.size())

    note_safely = context.guard(note, None)
    for style in _SPLIT_STYLES:
        # The method, since scripts have imported ``parallelize_module`` by name before.
        made = own_attribute(sys.modules[_STYLE_MODULE], style)
        context.patches.replace(made, "_apply", _noting_mesh(own_attribute(made, "_apply"), note_safely))


def _noting_mesh(original: Any, note: Any) -> Any:
    @functools.wraps(original)
    def apply(style: Any, module: Any, device_mesh: Any) -> Any:
        note(device_mesh)
        return original(style, module, device_mesh)

    return apply
