"""Both halves of the events, in C and in Python, and what a test reads of them."""

import functools
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchperfd.events import NATIVE, codes, reference
from torchperfd.hooks.batches import samples_in

native: Any = pytest.importorskip("torchperfd.events._native") if NATIVE else None

BOTH = [
    pytest.param(native, id="native", marks=pytest.mark.needs("gcc") if native is None else ()),
    pytest.param(reference, id="reference"),
]
both = pytest.mark.parametrize("kind", BOTH)

Written = list[tuple[int, int]]


def written(buffer: Any) -> Written:
    """Take codes and arguments from a ring buffer; check that times never run backwards."""
    events = list(struct.iter_unpack(codes.EVENT_FORMAT, buffer.peek()))
    buffer.skip(len(events))
    times = [time for time, _ in events]
    assert times == sorted(times)
    return [(word & codes.CODE_MASK, word >> codes.ARGUMENT_SHIFT) for _, word in events]


def codes_in(buffer: Any) -> list[int]:
    return [code for code, _ in written(buffer)]


class Batches:
    """An iterator as torch's are: without workers, unless it says otherwise."""

    _num_workers = 0

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Any:
        if not self.batches:
            raise StopIteration
        batch = self.batches.pop(0)
        if isinstance(batch, Exception):
            raise batch
        return batch


class Workers(Batches):
    """Its draws are announced."""

    _num_workers = 2


def drawing(
    kind: Any,
    buffer: Any,
    monkeypatch: pytest.MonkeyPatch,
    ahead: Callable[[Any], bool] = lambda _: False,
    models: list[Any] | None = None,
) -> Any:
    draws = kind.Draws(
        buffer,
        Batches.__next__,
        1,
        2,
        3,
        Batches,
        torch.Tensor,
        ahead,
        samples_in,
        torch.is_grad_enabled,
        [] if models is None else models,
    )
    draws.watching = False
    monkeypatch.setattr(Batches, "__next__", functools.update_wrapper(draws, Batches.__next__))
    return draws
