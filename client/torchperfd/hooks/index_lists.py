"""Index lists: how many samples the sampler of a map-style loader chose for each batch.

They are exact, whatever the function that puts the samples together makes of them: boxes of all images,
or pairs of texts. With workers a list is sent long before its batch is received.
"""

import functools
from typing import Any

from torch.utils.data import dataloader

from torchperfd.events import IndexLists
from torchperfd.events.reference import ONE_OR_BATCH
from torchperfd.hooks.context import HookContext, HookUnavailableError, describe, own_attribute
from torchperfd.hooks.frames import keep_out_of_graphs

_SENT = "torchperfd_samples_sent"
"""Attribute of an iterator with workers: samples of the batches that are being made, by their numbers."""


def install(context: HookContext) -> None:
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
                samples = number_of(indices, iterator._auto_collation)
                if samples == 1:
                    samples = ONE_OR_BATCH
                if iterator._num_workers:
                    vars(iterator).setdefault(_SENT, {})[iterator._send_idx] = samples
                elif here():
                    draws.known = samples
        except BaseException as error:
            if not failed(error):
                raise

    def next_index(iterator: Any) -> Any:
        try:
            if iterator._num_workers and here():
                draws.known = received(iterator)
        except BaseException as error:
            if not failed(error):
                raise
        indices = original(iterator)
        note(iterator, indices)
        return indices

    for function in (failed, note, next_index, received, number_of):
        keep_out_of_graphs(function)
    plain = getattr(dataloader, "_SingleProcessDataLoaderIter", None) or type(None)
    lists = IndexLists(context.buffer, original, draws, plain, "_dataset_kind", map_style, note, next_index)
    context.patches.replace(iterators, "_next_index", functools.update_wrapper(lists, original))


def received(iterator: Any) -> int:
    """Return the samples of the batch whose receipt has the next index list taken; 0 if there is none.

    Its number is the one that was sent and that the iterator waits for no longer: batches may be received
    in another order.
    """
    sent: dict[int, int] = vars(iterator).get(_SENT, {})
    if not iterator._send_idx:
        sent.clear()  # workers that persist begin anew
    waits_for = iterator._task_info
    for number in sent:
        if number not in waits_for:
            return sent.pop(number)
    return 0


def number_of(indices: Any, collates: bool) -> int:
    """Return the number of indices; 0 where it is a key, of which a data set makes a batch.

    Args:
        indices: What the sampler gave.
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
