"""DataLoaders: how long the loop waits for a batch, the samples in it, and where loops and workers begin.

The lengths of index lists are exact, whatever the collate function makes of the samples. With workers, a list
is sent long before its batch is received.
"""

import functools
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader, dataloader

from torchperfd.events import Draws, IndexLists, codes
from torchperfd.events.codes import ONE_OR_BATCH, evaluation_flags
from torchperfd.hooks.batches import samples_in, samples_of_one
from torchperfd.hooks.context import HookContext, HookUnavailableError, describe, own_attribute
from torchperfd.hooks.patches import inside_step, keep_out_of_graphs
from torchperfd.hooks.worker_stacks import WorkerEntry


class _Never:
    """Replaces a class that this torch does not have: every draw is announced then."""


def install_loader(context: HookContext) -> None:
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


_SENT_SAMPLES = "torchperfd_samples_sent"
"""Attribute of an iterator with workers: samples of the batches that are being made, by their numbers."""


def install_index_lists(context: HookContext) -> None:
    """Note the length of every index list as it is taken from the sampler."""
    draws, here = context.links.draws, context.buffer.here
    iterators = getattr(dataloader, "_BaseDataLoaderIter", None)
    kinds = getattr(dataloader, "_DatasetKind", None)
    if draws is None:
        raise HookUnavailableError("the hook loader is off")
    if iterators is None or kinds is None:
        raise HookUnavailableError("this torch has no dataloader._BaseDataLoaderIter or ._DatasetKind")
    original = own_attribute(iterators, "_next_index")
    map_style = kinds.Map

    def failed(error: BaseException) -> bool:
        """Return whether the error was ours; the hook goes off where this torch lacks a name."""
        if not context.absorb(error, costs_step=False):
            return False
        if isinstance(error, AttributeError):
            context.turn_off(describe(error))
        return True

    def note(iterator: Any, indices: Any) -> None:
        try:
            if iterator._dataset_kind == map_style:
                samples = number_of_indices(indices, iterator._auto_collation)
                if samples == 1:
                    samples = ONE_OR_BATCH
                if iterator._num_workers:
                    vars(iterator).setdefault(_SENT_SAMPLES, {})[iterator._send_idx] = samples
                elif here():
                    draws.known = samples
        except BaseException as error:
            if not failed(error):
                raise

    def next_index(iterator: Any) -> Any:
        try:
            if iterator._num_workers and here():
                draws.known = samples_received(iterator)
        except BaseException as error:
            if not failed(error):
                raise
        indices = original(iterator)
        note(iterator, indices)
        return indices

    for function in (failed, note, next_index, samples_received, number_of_indices):
        keep_out_of_graphs(function)
    plain = getattr(dataloader, "_SingleProcessDataLoaderIter", None) or type(None)
    lists = IndexLists(context.buffer, original, draws, plain, "_dataset_kind", map_style, note, next_index)
    context.patches.replace(iterators, "_next_index", functools.update_wrapper(lists, original))


def samples_received(iterator: Any) -> int:
    """Return the samples of the batch whose receipt has the next index list taken; 0 if there is none.

    Its number is the one that was sent and that the iterator waits for no longer: batches may be received
    in another order.
    """
    sent: dict[int, int] = vars(iterator).get(_SENT_SAMPLES, {})
    if not iterator._send_idx:
        sent.clear()  # workers that persist begin anew
    waits_for = iterator._task_info
    for number in sent:
        if number not in waits_for:
            return sent.pop(number)
    return 0


def number_of_indices(indices: Any, collates: bool) -> int:
    """Return the number of indices; 0 where it is a key, of which a data set makes a batch.

    Args:
        collates: The loader puts samples together.
    """
    if type(indices) is list:
        return len(indices)
    if not collates or isinstance(indices, str | bytes | int):
        return 0
    try:
        return len(indices)
    except TypeError:
        return 0  # an iterator, which must not be used up


def install_iterators(context: HookContext) -> None:
    """Take note of every iterator that a loader makes, so that a loop that is left early shows."""
    begin = own_attribute(DataLoader, "__iter__")
    iterators = context.links.iterators

    @functools.wraps(begin)
    def iterate(self: Any) -> Any:
        begun = begin(self)
        try:
            if context.active:
                iterators.begin(begun)
        except BaseException as error:
            if not context.absorb(error, costs_step=False):
                raise
        return begun

    context.patches.replace(DataLoader, "__iter__", keep_out_of_graphs(iterate))


def install_worker_entry(context: HookContext) -> None:
    """Have workers that start from now on answer requests for their stacks."""
    if sys.platform != "linux":
        raise HookUnavailableError("the sockets of workers are in Linux's abstract namespace")
    module = own_attribute(dataloader, "_utils").worker
    original = own_attribute(module, "_worker_loop")
    entry = WorkerEntry(context.links.worker_stacks.name, module.__name__, original.__name__, original)
    context.patches.replace(module, "_worker_loop", functools.update_wrapper(entry, original))
