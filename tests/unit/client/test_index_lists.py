"""Index lists: equal numbers from C and Python, whatever the sampler gives, and on any thread."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.client.event_halves import both, drawing, written

from torchperfd.events.codes import ONE_OR_BATCH
from torchperfd.hooks.batches import samples_of_one
from torchperfd.hooks.loader import number_of_indices, samples_received

MAP_STYLE, ITERABLE = 0, 1


class Indices:
    """An iterator's sampler."""

    def __init__(self, *given: Any, style: int = MAP_STYLE) -> None:
        self.style = style
        self._given: Iterator[Any] = iter(given)

    def next_index(self) -> Any:
        return next(self._given)


class Others(Indices):
    """Of another class than those without workers."""


class Noted:
    """What an ``IndexLists`` made of indices."""

    def __init__(self, kind: Any, monkeypatch: pytest.MonkeyPatch, note: Callable[..., None] | None = None):
        self.buffer = kind.EventBuffer(64)
        self.draws = drawing(kind, self.buffer, monkeypatch)
        self.unusual: list[Any] = []
        self.elsewhere: list[Any] = []
        self.take = kind.IndexLists(
            *(self.buffer, Indices.next_index, self.draws, Indices, "style", MAP_STYLE),
            note or (lambda _, indices: self.unusual.append(indices)),
            self.take_elsewhere,
        )

    def take_elsewhere(self, iterator: Any) -> Any:
        self.elsewhere.append(iterator)
        return iterator.next_index()


@both
def test_index_lists_of_several_give_their_length(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    noted, indices = Noted(kind, monkeypatch), Indices([1, 2, 3], [4, 5])
    assert (noted.take(indices), noted.draws.known) == ([1, 2, 3], 3)
    assert (noted.take(indices), noted.draws.known) == ([4, 5], 2)
    with pytest.raises(StopIteration):
        noted.take(indices)
    assert noted.unusual == noted.elsewhere == []


@both
@pytest.mark.parametrize("given", [[7], [], (1, 2), 5, torch.arange(3)], ids=str)
def test_index_lists_of_another_form_are_for_python(
    kind: Any, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted(kind, monkeypatch)
    assert noted.take(Indices(given)) is given
    assert len(noted.unusual) == 1
    assert noted.draws.known == 0


@both
def test_index_lists_of_iterable_data_say_nothing(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(kind, monkeypatch)
    noted.take(Indices([None, None], style=ITERABLE))
    assert (noted.draws.known, noted.unusual) == (0, [])


@both
def test_index_lists_elsewhere_are_for_python(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    noted, others = Noted(kind, monkeypatch), Others([1, 2])
    assert noted.take(others) == [1, 2]
    assert noted.elsewhere == [others]
    here = Indices([1, 2])
    thread = threading.Thread(target=noted.take, args=(here,))
    thread.start()
    thread.join()
    assert noted.elsewhere == [others, here]
    assert noted.draws.known == 0


@both
def test_index_lists_survive_an_error_of_ours(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("ours")

    noted = Noted(kind, monkeypatch, fail)
    assert noted.take(Indices([1])) == [1]
    without_kind = Indices([1, 2])
    del without_kind.style
    assert noted.take(without_kind) == [1, 2]


@both
@pytest.mark.parametrize(
    ("known", "batch", "samples"),
    [
        (5, torch.zeros(15, 2), 5),
        (0, torch.zeros(15, 2), 15),
        (ONE_OR_BATCH, torch.zeros(1, 2), 1),
        (ONE_OR_BATCH, [torch.zeros(1, 2), torch.zeros(7)], 1),
    ],
)
def test_draws_count_what_is_known(
    kind: Any, known: int, batch: Any, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted(kind, monkeypatch)

    class Drawn:
        def draw(self) -> Any:
            noted.draws.known = known
            return batch

    draws = kind.Draws(
        *(noted.buffer, Drawn.draw, 1, 2, 3, Drawn, torch.Tensor, lambda _: False),
        *(lambda batch: samples_of_one(batch) if known == ONE_OR_BATCH else 15, torch.is_grad_enabled, []),
    )
    draws.watching = False
    noted.draws = draws
    draws(Drawn())
    assert [argument for code, argument in written(noted.buffer) if code == 2] == [samples]
    assert draws.known == 0


@pytest.mark.parametrize(
    ("indices", "collates", "number"),
    [
        ([3, 4], True, 2),
        ([3, 4], False, 2),
        ((3, 4), True, 2),
        ((3, 4), False, 0),
        ("key", True, 0),
        (5, True, 0),
    ],
)
def test_number_of_indices_is_that_of_a_list(indices: Any, collates: bool, number: int) -> None:
    """Without collating, a tuple is one key of a data set that makes batches."""
    assert number_of_indices(indices, collates) == number
    assert number_of_indices(iter([1]), collates) == 0


def test_received_batch_is_the_one_not_waited_for() -> None:
    sender = SimpleNamespace(_send_idx=4, _task_info={0: (0,), 2: (1,), 3: (0,)})
    assert samples_received(sender) == 0
    sender.torchperfd_samples_sent = {0: 8, 1: 7, 2: 6, 3: 5}
    assert samples_received(sender) == 7
    assert sender.torchperfd_samples_sent == {0: 8, 2: 6, 3: 5}
    sender._send_idx = 0  # a new pass
    assert samples_received(sender) == 0
    assert not sender.torchperfd_samples_sent
