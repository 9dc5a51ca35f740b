"""Loops on other threads than the one that attached, and threads that help."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.scenarios.accounts import calls
from tests.unit.client.training import evaluate, loader, open_phases, per_step, tiny_model, train

import torchperfd


def on_a_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def a_training(batches: int) -> Callable[[], Any]:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return lambda: train(model, optimizer, loader(batches))


def test_thread_is_timed_from_its_first_optimizer_step(
    client: torchperfd.Client,
) -> None:
    on_a_thread(a_training(4))
    client.finish()
    # Of the first step, its optimizer is all that was seen on this thread.
    assert calls(client) == {**per_step(3), "steps": 4, "optimizer": 4, "other": 4}


def test_the_thread_that_is_followed_may_use_all_of_the_client(client: torchperfd.Client) -> None:
    def work() -> None:
        training = a_training(2)
        training()
        with client.phase("augment"):
            pass
        for _ in range(3):
            client.step(samples=5)

    on_a_thread(work)
    assert calls(client)["steps"] == 2 + 3
    assert client.report().totals.train.samples == 2 + 15


@pytest.mark.parametrize("phase", [True, False])
def test_main_thread_that_never_trains_yields_to_training_thread(
    client: torchperfd.Client, phase: bool
) -> None:
    model = tiny_model()
    for _ in loader(2):
        pass
    evaluate(model, loader(2))
    if phase:
        with client.phase("all of it"):
            on_a_thread(a_training(3))
    else:
        on_a_thread(a_training(3))
    client.finish()
    assert calls(client)["steps"] == 3
    assert open_phases(client) == 0


def test_a_thread_that_ended_is_followed_by_the_next(client: torchperfd.Client) -> None:
    """A thread per epoch."""
    training = a_training(3)
    for _ in range(3):
        on_a_thread(training)
    client.finish()
    assert calls(client)["steps"] == 9


def test_thread_that_has_stepped_stays_timed_while_it_lives(client: torchperfd.Client) -> None:
    a_training(2)()
    on_a_thread(a_training(5))
    assert calls(client) == per_step(2)


def test_a_thread_that_only_evaluates_is_not_followed(client: torchperfd.Client) -> None:
    on_a_thread(lambda: evaluate(tiny_model(), loader(3)))
    a_training(2)()
    assert calls(client) == per_step(2)
    assert calls(client, "validate") == {"steps": 0}


def test_draws_on_a_background_thread_are_not_the_loops(client: torchperfd.Client) -> None:
    """A prefetcher of the script's own: the loop waits for its queue, which no hook sees."""
    batches: queue.Queue[Any] = queue.Queue(2)

    def fetch() -> None:
        for batch in loader(4):
            batches.put(batch)
        batches.put(None)

    def drawn() -> Iterator[Any]:
        while (batch := batches.get()) is not None:
            yield batch

    model = tiny_model()
    torchperfd.attach(model=model)
    fetcher = threading.Thread(target=fetch)
    fetcher.start()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), drawn())
    fetcher.join()
    expected = per_step(4)
    del expected["data"]
    # The last zero_grad comes before a step, the first one before there was one.
    assert {**calls(client), "zero_grad": 4} == expected
    assert client.report().totals.train.samples == 0


def test_a_background_thread_and_a_wrapped_queue(client: torchperfd.Client) -> None:
    source = iter(loader(4))
    batches: queue.Queue[Any] = queue.Queue()

    def fetch() -> None:
        for batch in source:
            batches.put(batch)

    on_a_thread(fetch)
    model = tiny_model()
    torchperfd.attach(model=model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), client.wrap(batches.get() for _ in range(4)))
    assert calls(client) == per_step(4)
