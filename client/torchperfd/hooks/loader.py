"""Draws: how long the loop waits for its DataLoader."""

import functools
import sys
from typing import Any

import torch
from torch.utils.data import dataloader

from torchperfd.events import Draws, codes
from torchperfd.events.reference import ONE_OR_BATCH, evaluation_flags
from torchperfd.hooks.batches import samples_in, samples_of_one
from torchperfd.hooks.context import HookContext, HookUnavailableError, own_attribute
from torchperfd.hooks.frames import inside_step, keep_out_of_graphs


class _Never:
    """Replaces a class that this torch does not have: every draw is announced then."""


def install(context: HookContext) -> None:
    """Time ``next()`` of every DataLoader iterator, whatever its class and worker count."""
    buffer, links = context.buffer, context.links
    models = links.models.trained

    def ahead(iterator: Any) -> bool:
        try:
            watching = False
            for before_draw in links.before_draw:
                watching |= before_draw(iterator)
            draws.watching = watching
            if buffer.steps_open and inside_step(sys._getframe(1)):
                buffer.mark(codes.CLOSURE_DRAW, id(iterator))
            else:
                buffer.steps_open = 0
                buffer.mark(codes.DRAW, id(iterator) | evaluation_flags(torch.is_grad_enabled, models))
        except BaseException as error:
            if not context.absorb(error):
                raise
            return False
        return True

    def count(batch: Any) -> int:
        return samples_of_one(batch) if draws.known == ONE_OR_BATCH else samples_in(batch)

    for function in (ahead, count, samples_in, samples_of_one, evaluation_flags):
        keep_out_of_graphs(function)
    iterator = getattr(dataloader, "_BaseDataLoaderIter", None)
    if iterator is None:
        raise HookUnavailableError("this torch has no dataloader._BaseDataLoaderIter")
    original = own_attribute(iterator, "__next__")
    draws = Draws(
        buffer,
        original,
        codes.DRAW,
        codes.DRAWN,
        codes.EXHAUSTED,
        getattr(dataloader, "_SingleProcessDataLoaderIter", _Never),
        torch.Tensor,
        ahead,
        count,
        torch.is_grad_enabled,
        models,
    )
    context.patches.replace(iterator, "__next__", functools.update_wrapper(draws, original))
    links.draws = draws
