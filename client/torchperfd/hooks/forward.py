"""Forward passes of the models that were found, also after ``model.compile()`` and in replicas.

Calls of ``eval()`` and ``train()`` on these models show where a script begins to evaluate and to train again.
"""

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from torchperfd.events import Forward, codes
from torchperfd.hooks.context import HookContext, own_attribute
from torchperfd.hooks.patches import Patches, keep_out_of_graphs

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
        module: Any module.
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
