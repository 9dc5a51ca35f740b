"""Modes of the models that are trained: where a script begins to evaluate, and where it trains again."""

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from torchperfd.events import codes
from torchperfd.hooks.context import HookContext, own_attribute
from torchperfd.hooks.frames import keep_out_of_graphs
from torchperfd.hooks.patches import Patches


def install(context: HookContext) -> None:
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
            if context.active and buffer.here() and is_whole(module, models.trained):
                meanwhile.undo()
                meanwhile.replace(nn.Module, "train", train_noted)
                buffer.mark(codes.EVALUATION_MODE)
        except BaseException as error:
            if not context.absorb(error, costs_step=False):
                raise

    def ends(module: nn.Module) -> None:
        try:
            if buffer.here() and is_whole(module, models.trained):
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

    for function in (begins, ends, is_whole):
        keep_out_of_graphs(function)
    for replacement in (eval_noted, train_noted):
        keep_out_of_graphs(replacement, inline=True)
    context.patches.replace(nn.Module, "eval", eval_noted)
    context.handles.append(SimpleNamespace(remove=meanwhile.undo))


def is_whole(module: nn.Module, trained: "list[Any]") -> bool:
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
