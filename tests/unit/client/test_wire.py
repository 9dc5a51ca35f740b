"""The wire: what the client packs is what the daemon unpacks, to the nanosecond."""

from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.client.scripted import WALL_AHEAD, Clock, unpack

from torchperfd import __version__, wire
from torchperfd.account import Account, KindAccount
from torchperfd.identity import read_identity
from torchperfd.phases import PhaseNames
from torchperfd.recorder import DATA, PHASE_SLOTS, TRAIN, VALIDATE, Recorder, Rows
from torchperfd.v1 import contract, session_pb2
from torchperfd_daemon.service import translate


def sent(message: session_pb2.ClientMessage) -> session_pb2.ClientMessage:
    """Return a message as the other side reads it."""
    return session_pb2.ClientMessage.FromString(message.SerializeToString())


def all_names() -> PhaseNames:
    names = PhaseNames()
    for number in range(contract.MAX_USER_PHASES):
        names.slot(f"mine {number} ✓")
    return names


def test_hello_says_who_we_are_in_the_daemons_words(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "GROUP_RANK": "1", "POD_UID": "uid-1"}
    identity = read_identity(run="bert-17", job_name="bert", environ={**environ, "SLURM_JOB_ID": "42"})
    hello = sent(wire.hello(identity, "2.13.0+cpu")).hello
    assert (hello.api.min, hello.api.max) == (contract.API_MIN, contract.API_MAX)
    assert tuple(hello.features) == contract.FEATURES
    assert hello.client_version == __version__
    theirs = translate.identity(hello.identity)
    for name in theirs.__dataclass_fields__:
        expected = "2.13.0+cpu" if name == "torch_version" else getattr(identity, name)
        assert getattr(theirs, name) == expected, name
    assert (theirs.rank, theirs.world_size, theirs.local_rank, theirs.node_rank) == (3, 8, 1, 1)


def test_every_field_of_the_identity_is_sent() -> None:
    ours = read_identity(environ={})
    theirs = {field.name for field in session_pb2.RankIdentity.DESCRIPTOR.fields}
    assert theirs == {*ours.__dataclass_fields__, "torch_version"}


_NS = st.integers(0, 10**12)
_STEPS = st.lists(
    st.tuples(
        st.sampled_from([TRAIN, VALIDATE]),
        st.integers(0, 2**40),
        st.dictionaries(st.integers(0, PHASE_SLOTS - 1), st.lists(_NS, min_size=1, max_size=3), max_size=5),
    ),
    max_size=30,
)


def record(steps: list[tuple[int, int, dict[int, list[int]]]]) -> Rows:
    clock = Clock()
    recorder = Recorder(capacity=max(1, len(steps)), clock=clock, wall=clock.wall)
    recorder.open()
    indices = {TRAIN: 0, VALIDATE: 0}
    for kind, samples, phases in steps:
        recorder.samples = samples
        for phase, calls in phases.items():
            for ns in calls:
                recorder.enter(phase)
                clock.advance(ns)
                recorder.exit()
        recorder.close(kind, indices[kind])
        indices[kind] += 1
    return recorder.drain()


@settings(max_examples=60, deadline=None)
@given(_STEPS)
def test_steps_arrive_as_they_were_recorded(steps: list[tuple[int, int, dict[int, list[int]]]]) -> None:
    rows, names = record(steps), all_names()
    batch = sent(wire.step_batch(rows, names)).steps
    ours = unpack(rows, names)

    assert batch.count == len(steps)
    assert integers(batch.index) == [step.index for step in ours]
    assert integers(batch.kind) == [{"train": 1, "validate": 2}[step.kind] for step in ours]
    assert integers(batch.samples) == [step.samples for step in ours]
    for column in batch.phases:
        assert integers(column.calls) == [step.phases.get(column.phase, (0, 0))[0] for step in ours]
        assert integers(column.ns) == [step.phases.get(column.phase, (0, 0))[1] for step in ours]
    assert {column.phase for column in batch.phases} == {name for step in ours for name in step.phases}

    theirs = translate.training_steps(batch)
    training = [step for step in ours if step.kind == "train"]
    assert list(theirs.duration_ns) == [step.duration for step in training]
    assert list(theirs.end_unix_ns) == [step.start + step.duration + WALL_AHEAD for step in training]
    for name, values in theirs.phases.items():
        assert list(values) == [step.phases.get(name, (0, 0))[1] for step in training]
    for position, step in enumerate(training):
        assert sum(values[position] for values in theirs.phases.values()) == step.duration


@settings(max_examples=60, deadline=None)
@given(_STEPS, _NS, st.dictionaries(st.sampled_from(["ring", "outbox"]), _NS))
def test_an_account_arrives_as_it_was_added_up(
    steps: list[tuple[int, int, dict[int, list[int]]]], recorded: int, dropped: dict[str, int]
) -> None:
    names, account = all_names(), Account()
    account.fold(record(steps))
    message = sent(wire.account_message(account, names, recorded, dropped)).account

    theirs = translate.totals(message)
    assert (theirs.recorded, theirs.dropped) == (recorded, dropped)
    for ours, total in ((account.train, theirs.train), (account.validate, theirs.validate)):
        assert (total.steps, total.ns, total.samples) == (ours.steps, ours.ns, ours.samples)
        assert {name: (phase.calls, phase.ns, phase.squares) for name, phase in total.phases.items()} == {
            names.name(slot): (phase.calls, phase.ns, phase.squares)
            for slot, phase in enumerate(ours.phases)
            if phase.calls
        }

    # The daemon hands it to another rank, which reads it as if it were its own.
    again = session_pb2.Account.FromString(translate.account_message(theirs).SerializeToString())
    told = wire.read_account(again, all_names())
    # What only this rank's own report needs is not sent.
    assert told.train == replace(account.train, squares=0.0)
    assert told.validate == replace(account.validate, squares=0.0)
    assert (told.warmup, told.began_ns, told.ended_ns) == (KindAccount(), 0, 0)


def test_phases_that_never_occurred_take_no_room() -> None:
    message = wire.step_batch(record([(TRAIN, 1, {DATA: [5]})] * 3), all_names()).steps
    assert [column.phase for column in message.phases] == ["data", "other"]
    empty = wire.account_message(Account(), PhaseNames(), 0, {}).account
    assert len(empty.kinds) == 0


def test_a_phase_open_across_an_edge_is_sent_before_it_ends() -> None:
    clock = Clock()
    recorder = Recorder(capacity=4, clock=clock, wall=clock.wall)
    recorder.enter(DATA)
    clock.advance(7)
    recorder.close(TRAIN, 0)
    phases = translate.training_steps(wire.step_batch(recorder.drain(), PhaseNames()).steps).phases
    assert list(phases["data"]) == [7]


def test_user_phases_of_another_rank_get_slots_by_name() -> None:
    message = session_pb2.Account()
    kind = message.kinds.add(kind=session_pb2.STEP_KIND_TRAIN, steps=1, step_ns=30)
    kind.phases.add(phase="theirs", calls=1, ns=10, sum_squares_ns2=100.0)
    kind.phases.add(phase="ours", calls=2, ns=20, sum_squares_ns2=200.0)
    message.kinds.add(kind=session_pb2.STEP_KIND_UNSPECIFIED, steps=99)
    names = PhaseNames()
    ours = names.slot("ours")
    account = wire.read_account(message, names)
    assert account.train.phases[ours].ns == 20
    assert account.train.phases[names.slot("theirs")].ns == 10
    assert (account.train.steps, account.validate.steps) == (1, 0)


def test_columns_are_little_endian_whatever_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    column = array("q", [1, -2])
    expected = bytes([1, *[0] * 7, 0xFE, *[0xFF] * 7])
    assert wire._bytes(column) == expected
    swapped = array("q", column)
    swapped.byteswap()
    monkeypatch.setattr("sys.byteorder", "big")  # where memory holds the bytes the other way around
    assert wire._bytes(swapped) == expected
    assert swapped[0] != 1  # the caller's column is as it was


def integers(blob: bytes) -> list[Any]:
    return [int.from_bytes(blob[at : at + 8], "little", signed=True) for at in range(0, len(blob), 8)]
