"""The outbox: bounded, honest about what it threw away, and never a place to hang."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd.link.outbox import Outbox


def taken(outbox: Outbox[str]) -> list[str]:
    items: list[str] = []
    while some := outbox.take(0):
        items += some
    return items


@pytest.mark.parametrize(
    ("put", "messages", "dropped"),
    [
        # Messages come out in the order in which they went in.
        ([("batch 1", 3), ("capture done", 0), ("batch 2", 4)], ["batch 1", "capture done", "batch 2"], 0),
        ([("ack", 0), ("old", 6), ("result", 0), ("newer", 4)], ["ack", "old", "result", "newer"], 0),
        # The oldest batches go first, as many as it takes, and nothing else does.
        (
            [("ack", 0), ("old", 6), ("result", 0), ("new", 4), ("newest", 5)],
            ["ack", "result", "new", "newest"],
            6,
        ),
        ([*((f"batch {number}", 2) for number in range(5)), ("large", 7)], ["batch 4", "large"], 8),
        # A batch that is larger than the box is dropped itself.
        ([("fits", 10), ("never fits", 11)], [], 21),
    ],
)
def test_outbox_drops_the_oldest_batches(
    put: list[tuple[str, int]], messages: list[str], dropped: int
) -> None:
    outbox: Outbox[str] = Outbox(10)
    for message, weight in put:
        outbox.put(message, weight=weight)
    assert (len(outbox), outbox.dropped) == (len(messages), dropped)
    assert taken(outbox) == messages
    assert len(outbox) == 0


def test_what_was_taken_makes_room() -> None:
    outbox: Outbox[str] = Outbox(2)
    for number in range(100):
        outbox.put(str(number), weight=2)
        assert outbox.take(0) == [str(number)]
    assert outbox.dropped == 0


def test_of_a_topic_only_the_newest_is_kept() -> None:
    outbox: Outbox[str] = Outbox(10)
    outbox.put_newest("account", "account 1")
    outbox.put_newest("state", "training")
    outbox.put("batch", weight=1)
    outbox.put_newest("account", "account 2")
    assert len(outbox) == 3
    # After all that was put before it; a newer one keeps its topic's turn.
    assert taken(outbox) == ["batch", "account 2", "training"]


def test_close_message_put_last_is_sent_last() -> None:
    outbox: Outbox[str] = Outbox(10)
    outbox.put_newest("account", "account 1")
    outbox.put_newest("goodbye", "bye")
    outbox.put_newest("account", "account 2")
    outbox.put("batch", weight=1)
    assert taken(outbox) == ["batch", "account 2", "bye"]


@given(st.lists(st.one_of(st.none(), st.integers(0, 12)), max_size=60))
def test_outbox_over_its_limit_counts_every_lost_message(weights: list[int | None]) -> None:
    outbox: Outbox[int] = Outbox(20)
    put = got = 0
    for weight in weights:  # None: somebody takes one
        if weight is None:
            got += sum(outbox.take(0))
        else:
            put += weight
            outbox.put(weight, weight=weight)
        assert put - got - outbox.dropped <= 20
    got += sum(outbox.take(0, 100))
    assert put == got + outbox.dropped


@given(st.lists(st.integers(1, 12), max_size=60))
def test_what_is_kept_is_the_newest_that_fits(weights: list[int]) -> None:
    outbox: Outbox[int] = Outbox(20)
    for weight in weights:
        outbox.put(weight, weight=weight)
    kept = outbox.take(0, 100)
    assert sum(kept) + outbox.dropped == sum(weights)
    assert kept == weights[len(weights) - len(kept) :]


def test_getting_from_an_empty_box_ends_with_nothing() -> None:
    outbox: Outbox[str] = Outbox(1)
    assert outbox.take(0) == []
    assert outbox.take(0.001, 5) == []


def test_what_is_there_can_be_taken_at_once_up_to_so_many() -> None:
    outbox: Outbox[str] = Outbox(10)
    for number in range(3):
        outbox.put(f"batch {number}", weight=3)
    outbox.put_newest("account", "account")
    outbox.put_newest("state", "training")
    assert outbox.take(60, 2) == ["batch 0", "batch 1"]
    assert outbox.take(60, 2) == ["batch 2", "account"]
    outbox.put("batch 3", weight=10)
    assert outbox.take(60, 9) == ["batch 3", "training"]
    assert (len(outbox), outbox.dropped) == (0, 0)


def test_put_wakes_the_waiting_thread() -> None:
    outbox: Outbox[str] = Outbox(1)
    with waiting(outbox) as got:
        outbox.put("news")
    assert got == ["news"]
    with waiting(outbox) as got:
        outbox.put_newest("topic", "newest")
    assert got == ["newest"]


def test_close_wakes_the_waiting_thread_and_keeps_messages() -> None:
    outbox: Outbox[str] = Outbox(5)
    with waiting(outbox) as got:
        outbox.close()
    assert got == []
    assert outbox.closed
    outbox.put("still here", weight=1)
    outbox.put_newest("state", "finished")
    assert outbox.take(60) == ["still here"]
    assert outbox.take(60) == ["finished"]
    assert outbox.take(60) == []  # at once: nothing more will come


@contextmanager
def waiting(outbox: Outbox[str]) -> Iterator[list[str]]:
    """Take on another thread, for up to a minute; give what came once the block has ended."""
    got: list[str] = []
    thread = threading.Thread(target=lambda: got.extend(outbox.take(60)))
    thread.start()
    yield got
    thread.join(30)
    assert not thread.is_alive()
