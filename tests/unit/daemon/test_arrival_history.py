"""The daemon keeps when each rank came to its collectives, by step."""

import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd.link import wire
from torchperfd.steps.phases import TRAIN, PhaseNames, StepBatch
from torchperfd.steps.step_series import Arrivals
from torchperfd.v1 import session_pb2
from torchperfd_daemon.service import translate
from torchperfd_daemon.store.history import Arrival, ArrivalHistory
from torchperfd_daemon.store.model import ArrivalColumns, RankIdentity
from torchperfd_daemon.store.store import Store

INDEX, KIND, START, DURATION, SAMPLES = (memoryview(array("q", [value])) for value in (7, TRAIN, 1000, 50, 0))
STEP = StepBatch(INDEX, KIND, START, DURATION, SAMPLES, {}, total_ns=50, squares=2500.0, total_samples=0)


def columns(steps: list[int]) -> ArrivalColumns:
    return ArrivalColumns(
        array("q", steps),
        array("q", [10 * step for step in steps]),
        array("q", [10 * step + 5 for step in steps]),
    )


# Now and then so many one after the other that nothing before them is left.
GAPS = st.lists(st.integers(1, 5), max_size=12) | st.lists(st.just(1), min_size=7, max_size=30)


@given(st.lists(GAPS, max_size=6))
def test_the_newest_steps_are_kept(batches: list[list[int]]) -> None:
    history, step, known = ArrivalHistory(capacity=8), 0, []
    for gaps in batches:
        steps = []
        for gap in gaps:
            step += gap
            steps.append(step)
        history.append(columns(steps))
        known += steps
    assert history.newest == (known[-1] if known else -1)
    for asked in range(-2, step + 10):
        overwritten = any(other > asked and other % 8 == asked % 8 for other in known)
        kept = asked in known and not overwritten
        assert history.at(asked) == (Arrival(10 * asked, 10 * asked + 5) if kept else None)


def test_from_the_client_to_the_store() -> None:
    sent = wire.step_batch(
        [STEP], PhaseNames(), Arrivals(array("q", [7]), array("q", [11]), array("q", [12]))
    )
    store = Store()
    rank = store.join(RankIdentity("run", 0))
    store.add_steps(rank, translate.training_steps_from_message(sent.steps))
    assert (rank.arrivals.newest, rank.arrivals.at(7)) == (7, Arrival(11, 12))


def test_steps_without_collectives_send_no_arrivals() -> None:
    none = Arrivals(array("q"), array("q"), array("q"))
    assert not wire.step_batch([STEP], PhaseNames(), none).steps.HasField("arrivals")


@given(st.lists(st.binary(max_size=24) | st.binary(min_size=16, max_size=16), min_size=3, max_size=3))
def test_no_bytes_break_the_daemon(blobs: list[bytes]) -> None:
    step, first, last = blobs
    batch = session_pb2.StepBatch(arrivals=session_pb2.Arrivals(step=step, first_ns=first, last_ns=last))
    try:
        arrivals = translate.training_steps_from_message(batch).arrivals
    except translate.BadMessageError:
        return
    history = ArrivalHistory()
    history.append(arrivals)
    assert len(arrivals.step) == len(arrivals.first_unix_ns) == len(arrivals.last_unix_ns)


@pytest.mark.parametrize("step", [-1, 2**63 - 1])
def test_a_step_that_no_run_makes_is_refused(step: int) -> None:
    blob = struct.pack("<q", step)
    batch = session_pb2.StepBatch(arrivals=session_pb2.Arrivals(step=blob, first_ns=blob, last_ns=blob))
    with pytest.raises(translate.BadMessageError, match="no run makes"):
        translate.training_steps_from_message(batch)
