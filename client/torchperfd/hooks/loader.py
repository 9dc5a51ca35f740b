"""Draws: how long the loop waits for its DataLoader."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    dataloader,
    default_collate,
)

from torchperfd.hooks.batches import samples_in
from torchperfd.hooks.context import HookContext
from torchperfd.hooks.frames import inside_step, keep_out_of_graphs
from torchperfd.hooks.models import RootModels
from torchperfd.hooks.patches import Patches
from torchperfd.interrupts import is_from_script
from torchperfd.iterators import Iterators
from torchperfd.loader_use import LoaderSampler
from torchperfd.tape import Draws
from torchperfd.tape import events as on_tape
from torchperfd.tape.portable import evaluation_flags


def install(
    context: HookContext,
    patches: Patches,
    roots: RootModels,
    iterators: Iterators,
    after_last: Callable[[], None],
    sampler: LoaderSampler,
) -> None:
    """Time ``next()`` of every DataLoader iterator, whatever its class and worker count.

    Args:
        context: Where to report.
        patches: Where to remember the original.
        roots: Looks for models ahead of the first draws, outside of any step's time.
        iterators: Told of every iterator that a loader makes.
        after_last: Called once a loader is exhausted.
        sampler: Samples how the loader is used.
    """
    tape = context.tape

    def ahead(iterator: Any) -> bool:
        try:
            draws.watching = roots.before_draw()
            ready = -1
            if iterator._num_workers:
                ready = _ready(iterator)
                tape.mark(on_tape.READY, ready + 1)
            draws.watching |= sampler.at_draw(iterator, ready)
            if tape.steps_open and inside_step(sys._getframe(1)):
                tape.mark(on_tape.CLOSURE_DRAW, id(iterator))
            else:
                tape.steps_open = 0
                tape.mark(on_tape.DRAW, id(iterator) | evaluation_flags(torch.is_grad_enabled, roots.alive))
        except BaseException as error:
            if not context.absorb("draw", error):
                raise
            return False
        return True

    def exhausted() -> None:
        try:
            after_last()
        except BaseException as error:
            if not context.absorb("draw", error):
                raise

    for function in (ahead, exhausted, samples_in, _ready, evaluation_flags):
        keep_out_of_graphs(function)
    iterator = dataloader._BaseDataLoaderIter
    original = vars(iterator)["__next__"]
    draws = Draws(
        tape,
        original,
        on_tape.DRAW,
        on_tape.DRAWN,
        on_tape.EXHAUSTED,
        dataloader._SingleProcessDataLoaderIter,
        torch.Tensor,
        ahead,
        exhausted,
        samples_in,
        torch.is_grad_enabled,
        roots.alive,
    )
    patches.replace(iterator, "__next__", functools.update_wrapper(draws, original))
    begin = vars(dataloader.DataLoader)["__iter__"]

    @functools.wraps(begin)
    def iterate(self: Any) -> Any:
        begun = begin(self)
        try:
            if context.active:
                iterators.begin(begun)
        except BaseException as error:
            if not context.absorb("draw", error):
                raise
        return begun

    patches.replace(dataloader.DataLoader, "__iter__", keep_out_of_graphs(iterate))

    def watch() -> None:
        draws.watching = True

    sampler.install(watch, torch.is_grad_enabled, _describe, torch.Tensor)


def _describe(iterator: Any) -> tuple[int, bool, bool]:
    """Return an iterator's batch size (0: not its own), whether its dataset is indexable, whether shuffled.

    Indexable is a ``TensorDataset`` that can be indexed by all of a batch at once with the same result.
    """
    batches = getattr(iterator, "_index_sampler", None)
    if type(batches) is not BatchSampler:
        return 0, False, False
    order = batches.sampler
    shuffles = type(order) is RandomSampler and not order.replacement
    usual = shuffles or type(order) is SequentialSampler
    collated = getattr(iterator, "_collate_fn", None) is default_collate
    return batches.batch_size, usual and collated and type(iterator._dataset) is TensorDataset, shuffles


def _ready(iterator: Any) -> int:
    """Return how many batches the workers have ready, -1 where that cannot be told."""
    try:
        size: int = iterator._worker_result_queue.qsize()
    except (AttributeError, NotImplementedError, OSError) as error:
        if is_from_script(error):
            raise
        return -1  # macOS has no count; the queue may be closing
    return size
