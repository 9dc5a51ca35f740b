"""The wire: what the client packs is what the daemon unpacks, to the nanosecond."""

from array import array
from dataclasses import fields
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.client.scripted import WALL_AHEAD, Clock, all_names, unpack

from torchperfd import __version__
from torchperfd.events import NATIVE
from torchperfd.link import wire
from torchperfd.model.host_memory import MAX_COURSE, HostMemory
from torchperfd.model.identity import read_identity
from torchperfd.model.loader_facts import LoaderFacts
from torchperfd.model.process import UNBOUND, Coordinate, CpuBinding, HookState
from torchperfd.model.source_lines import InputStages, SyncWait, TimedLine
from torchperfd.model.totals import CudaMemory, GcTotals, PhaseTotals
from torchperfd.steps.phases import DATA, FORWARD, PHASE_SLOTS, TRAIN, VALIDATE, PhaseNames, StepBatch
from torchperfd.steps.recorder import Recorder
from torchperfd.steps.step_series import BlockSums
from torchperfd.steps.totals import KindTotals, Totals
from torchperfd.v1 import contract, session_pb2
from torchperfd_daemon.service import translate, translate_diagnosis


def sent(message: session_pb2.ClientMessage) -> session_pb2.ClientMessage:
    """Return a message as the other side reads it."""
    return session_pb2.ClientMessage.FromString(message.SerializeToString())


def test_hello_identifies_the_client_in_the_daemons_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "GROUP_RANK": "1", "POD_UID": "uid-1"}
    identity = read_identity(run="bert-17", job_name="bert", environ={**environ, "SLURM_JOB_ID": "42"})
    hello = sent(wire.hello(identity, "2.13.0+cpu")).hello
    assert (hello.api.min, hello.api.max) == (contract.API_MIN, contract.API_MAX)
    hooks = contract.NATIVE_HOOKS if NATIVE else contract.REFERENCE_HOOKS
    assert tuple(hello.features) == (*contract.FEATURES, hooks)
    assert hello.client_version == __version__
    theirs = translate.identity_from_message(hello.identity)
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


def record(steps: list[tuple[int, int, dict[int, list[int]]]]) -> list[StepBatch]:
    clock = Clock()
    recorder = Recorder(clock, capacity=max(1, len(steps)))
    recorder.wall_offset = WALL_AHEAD
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


@settings(max_examples=60)
@given(_STEPS)
def test_steps_arrive_as_they_were_recorded(steps: list[tuple[int, int, dict[int, list[int]]]]) -> None:
    drained, names = record(steps), all_names()
    batch = sent(wire.step_batch(drained, names)).steps
    ours = unpack(drained, names)

    assert batch.count == len(steps)
    assert integers(batch.kind) == [{"train": 1, "validate": 2}[step.kind] for step in ours]
    for column in batch.phases:
        assert integers(column.ns) == [step.phases.get(column.phase, (0, 0))[1] for step in ours]
    assert {column.phase for column in batch.phases} == {name for step in ours for name in step.phases}

    theirs = translate.training_steps_from_message(batch)
    training = [step for step in ours if step.kind == "train"]
    assert theirs.next_step == len(training)
    assert list(theirs.duration_ns) == [step.duration for step in training]
    assert list(theirs.end_unix_ns) == [step.start + step.duration + WALL_AHEAD for step in training]
    for name, values in theirs.phases.items():
        assert list(values) == [step.phases.get(name, (0, 0))[1] for step in training]
    for position, step in enumerate(training):
        assert sum(values[position] for values in theirs.phases.values()) == step.duration


@settings(max_examples=60)
@given(_STEPS, _NS, st.dictionaries(st.sampled_from(["ring", "outbox"]), _NS))
def test_totals_arrive_as_added(
    steps: list[tuple[int, int, dict[int, list[int]]]], recorded: int, dropped: dict[str, int]
) -> None:
    names, totals = all_names(), Totals()
    totals.add(record(steps))
    message = sent(wire.totals_to_message(totals, names, recorded, dropped)).account

    theirs = translate_diagnosis.totals_from_message(message)
    assert (theirs.recorded, theirs.dropped) == (recorded, dropped)
    for ours, total in ((totals.train, theirs.train), (totals.validate, theirs.validate)):
        assert (total.steps, total.ns, total.samples) == (ours.steps, ours.ns, ours.samples)
        assert {name: (phase.calls, phase.ns, phase.squares) for name, phase in total.phases.items()} == {
            names.name(slot): (phase.calls, phase.ns, phase.squares)
            for slot, phase in enumerate(ours.phases)
            if phase.calls
        }

    assert told_by_the_daemon(message) == totals


def told_by_the_daemon(message: session_pb2.Account) -> Totals:
    """Return the account that another rank reads, which asks the daemon."""
    again = translate_diagnosis.totals_to_message(translate_diagnosis.totals_from_message(message))
    return wire.totals_from_message(session_pb2.Account.FromString(again.SerializeToString()), all_names())


_COUNT = st.integers(0, 2**40)
_MEMORY = st.builds(
    HostMemory,
    *(_COUNT, _COUNT, _COUNT, st.floats(0, 1e9), st.floats(0, 1e9)),
    st.lists(_COUNT, max_size=MAX_COURSE).map(tuple),
)
_CALLS = st.integers(1, 2**40)
_SQUARES = st.floats(0, 1e30)
_PHASE = (
    st.just(PhaseTotals())
    | st.builds(PhaseTotals, _CALLS, _COUNT, _SQUARES)
    | st.builds(PhaseTotals, _CALLS, _COUNT, _SQUARES, _COUNT, _CALLS)
)
_QUANTITY = st.none() | st.floats(0, 1e18)


_FIGURE = st.none() | st.floats(0, 1e6)
_LOADER = st.builds(
    LoaderFacts,
    *(st.integers(0, 99), st.floats(0.5, 1e3), _FIGURE, _FIGURE, st.integers(0, 99), _COUNT),
    *(st.integers(0, 2**20), _FIGURE, _FIGURE, _FIGURE, st.booleans(), st.booleans(), st.floats(0, 1e3)),
    _FIGURE,
    st.none() | st.builds(InputStages, st.integers(0, 99), st.integers(0, 99), *(_FIGURE,) * 5),
)


def _kind(kind_steps: int, phase: PhaseTotals, counts: tuple[int, int, int]) -> KindTotals:
    made = KindTotals(steps=kind_steps, ns=5, squares=25.0)
    made.micro_batches, made.skipped, made.tokens = counts
    if phase.calls:
        made.phases[DATA] = phase
    return made


_KIND = st.builds(_kind, st.integers(1, 2**40), _PHASE, st.tuples(_COUNT, _COUNT, _COUNT))


@settings(max_examples=60)
@given(
    st.builds(
        Totals,
        train=_KIND,
        validate=_KIND,
        warmup=_KIND,
        began_ns=_COUNT,
        ended_ns=_COUNT,
        checkpoint=_PHASE,
        gc=st.tuples(*[st.builds(GcTotals, _COUNT, _COUNT)] * 3) | st.just(()),
        loader_ready=st.none() | st.integers(0, 2**31),
        epoch=_PHASE,
        train_pass=_PHASE,
        validate_pass=_PHASE,
        cuda=st.none() | st.builds(CudaMemory, _COUNT, _COUNT, _COUNT),
        host_memory=st.none() | _MEMORY,
        flops_per_step=_QUANTITY,
        peak_flops=_QUANTITY,
        overhead=_QUANTITY,
        degradation_level=st.integers(0, 9),
        loader=st.none() | _LOADER,
        hooks=st.just((HookState("loader"), HookState("forward", "this torch has no Module._call_impl")))
        | st.just(()),
        coordinates=st.just((Coordinate("pp", 1, 2), Coordinate("dp_shard", 0, 4))) | st.just(()),
        sync_waits=st.just((SyncWait("/home/a/train.py", 57, "item", 9), SyncWait("b.py", 1, "cpu", 8)))
        | st.just(()),
        threads=st.none() | st.integers(1, 2**16),
        cpus=st.none() | st.floats(0.5, 512),
        binding=st.just(UNBOUND) | st.just(CpuBinding(1, 8)),
        switches=st.just(()) | st.just(("CUDA_LAUNCH_BLOCKING=1",)),
        epoch_starts=_PHASE,
        collect_calls=st.just(()) | st.just((TimedLine("/home/a/train.py", 31, "collect", 3, 9),)),
        script_collectives=st.just(()) | st.just((TimedLine("b.py", 22, "all_reduce", 12, 8),)),
        graph_limit=st.just("") | st.just("forward() at model.py:12"),
        device_work=_PHASE,
    )
)
def test_all_that_is_known_beside_the_steps_arrives_too(totals: Totals) -> None:
    message = sent(wire.totals_to_message(totals, all_names(), 0, {})).account
    assert wire.totals_from_message(message, all_names()) == totals
    assert told_by_the_daemon(message) == totals


def test_every_field_of_the_totals_is_sent() -> None:
    """Each is covered by one field of the messages, under any name."""
    for ours, theirs in (
        (Totals, session_pb2.Account),
        (KindTotals, session_pb2.KindAccount),
        (PhaseTotals, session_pb2.PhaseAccount),
        (CudaMemory, session_pb2.CudaMemory),
        (GcTotals, session_pb2.GcAccount),
        (TimedLine, session_pb2.TimedLine),
        (LoaderFacts, session_pb2.LoaderUse),
        (InputStages, session_pb2.InputStages),
    ):
        beside = {
            session_pb2.Account: {"recorded_steps", "dropped_steps", "kinds", "step_blocks"},
            session_pb2.KindAccount: {"kind"},
            session_pb2.PhaseAccount: {"phase"},
        }
        reported = {field.name for field in theirs.DESCRIPTOR.fields} - beside.get(theirs, set())
        kept = {field.name for field in fields(ours)} - ({"train", "validate"} if ours is Totals else set())
        assert len(reported) == len(kept), (reported, kept)


def test_older_client_leaves_missing_values_unknown() -> None:
    message = session_pb2.Account(recorded_steps=4, dropped_steps={"ring": 1})
    kind = message.kinds.add(kind=session_pb2.STEP_KIND_TRAIN, steps=4, step_ns=40, samples=8)
    kind.phases.add(phase="data", calls=4, ns=40, sum_squares_ns2=400.0)
    for reported in (wire.totals_from_message(message, all_names()), told_by_the_daemon(message)):
        expected = Totals(train=KindTotals(steps=4, ns=40, samples=8), gc=())
        expected.train.phases[DATA] = PhaseTotals(4, 40, 400.0)
        assert reported == expected
    theirs = translate_diagnosis.totals_from_message(message)
    unknown = (theirs.checkpoint, theirs.loader_ready, theirs.cuda, theirs.overhead, theirs.flops_per_step)
    assert unknown == (None,) * 5
    assert theirs.gc == ()


def test_an_older_daemon_reads_what_it_knows() -> None:
    totals = Totals(train=_kind(4, PhaseTotals(4, 5, 25.0, 6, 4), (8, 1, 99)), warmup=KindTotals(steps=1))
    totals.cuda, totals.overhead, totals.loader_ready = CudaMemory(1, 2, 3, "a1b2"), 0.01, 0
    new = wire.totals_to_message(totals, all_names(), 4, {"ring": 1})
    old = older_message().FromString(new.SerializeToString()).account
    assert (old.recorded_steps, dict(old.dropped_steps)) == (4, {"ring": 1})
    (kind,) = old.kinds
    assert (kind.kind, kind.steps, kind.step_ns) == (session_pb2.STEP_KIND_TRAIN, 4, 5)
    assert [(phase.phase, phase.calls, phase.ns) for phase in kind.phases] == [("data", 4, 5)]


def older_message() -> Any:
    """Return ``ClientMessage`` of the first release, whose accounts had fewer fields."""
    first_release = {"Account": 3, "KindTotals": 5, "PhaseTotals": 4}
    file = descriptor_pb2.FileDescriptorProto()
    session_pb2.DESCRIPTOR.CopyToProto(file)
    for message in file.message_type:
        last = first_release.get(message.name)
        if last is not None:
            kept = [field for field in message.field if field.number <= last]
            del message.field[:], message.oneof_decl[:]
            message.field.extend(kept)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("torchperfd.v1.ClientMessage"))


def test_phases_that_never_occurred_take_no_room() -> None:
    message = wire.step_batch(record([(TRAIN, 1, {DATA: [5]})] * 3), all_names()).steps
    assert [column.phase for column in message.phases] == ["data", "other"]
    empty = wire.totals_to_message(Totals(), PhaseNames(), 0, {}).account
    assert len(empty.kinds) == 0


def test_a_phase_open_across_an_edge_is_sent_before_it_ends() -> None:
    clock = Clock()
    recorder = Recorder(clock, capacity=4)
    recorder.wall_offset = WALL_AHEAD
    recorder.enter(DATA)
    clock.advance(7)
    recorder.close(TRAIN, 0)
    phases = translate.training_steps_from_message(
        wire.step_batch(recorder.drain(), PhaseNames()).steps
    ).phases
    assert list(phases["data"]) == [7]


def test_user_phases_of_another_rank_get_slots_by_name() -> None:
    message = session_pb2.Account()
    kind = message.kinds.add(kind=session_pb2.STEP_KIND_TRAIN, steps=1, step_ns=30)
    kind.phases.add(phase="theirs", calls=1, ns=10, sum_squares_ns2=100.0)
    kind.phases.add(phase="ours", calls=2, ns=20, sum_squares_ns2=200.0)
    message.kinds.add(kind=session_pb2.STEP_KIND_UNSPECIFIED, steps=99)
    names = PhaseNames()
    ours = names.slot("ours")
    totals = wire.totals_from_message(message, names)
    assert totals.train.phases[ours].ns == 20
    assert totals.train.phases[names.slot("theirs")].ns == 10
    assert (totals.train.steps, totals.validate.steps) == (1, 0)


def test_columns_are_little_endian_whatever_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    column = array("q", [1, -2])
    expected = bytes([1, *[0] * 7, 0xFE, *[0xFF] * 7])
    assert wire.join_columns([column]) == expected
    swapped = array("q", column)
    swapped.byteswap()
    monkeypatch.setattr("sys.byteorder", "big")  # where memory holds the bytes the other way around
    assert wire.join_columns([swapped]) == expected
    assert swapped[0] != 1  # the caller's column is as it was


def integers(blob: bytes) -> list[Any]:
    return [int.from_bytes(blob[at : at + 8], "little", signed=True) for at in range(0, len(blob), 8)]


def test_blocks_of_steps_survive_the_wire() -> None:
    names = PhaseNames()
    augment = names.slot("augment")
    blocks = BlockSums(4, (1000, 2000), {FORWARD: (600, 1300), augment: (400, 700)})
    message = wire.totals_to_message(Totals(), names, 9, {}, blocks).account
    others = PhaseNames()
    others.slot("another")
    received = wire.blocks_from_message(session_pb2.Account.FromString(message.SerializeToString()), others)
    assert received is not None
    assert (received.steps, received.step_ns) == (4, (1000, 2000))
    assert received.phase_ns == {FORWARD: (600, 1300), others.slot("augment"): (400, 700)}


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xff\xff",
        session_pb2.StepBlocks(steps=1, step_ns=b"odd").SerializeToString(),
        session_pb2.StepBlocks(steps=0, step_ns=bytes(8)).SerializeToString(),
        session_pb2.StepBlocks(steps=1, step_ns=b"\xff" * 8).SerializeToString(),
        session_pb2.StepBlocks(
            steps=1, step_ns=bytes(16), phases=[session_pb2.PhaseColumn(phase="data", ns=bytes(8))]
        ).SerializeToString(),
        session_pb2.StepBlocks(
            steps=1, step_ns=bytes(8), phases=[session_pb2.PhaseColumn(phase="\n", ns=bytes(8))]
        ).SerializeToString(),
    ],
)
def test_damaged_blocks_of_steps_are_none(packed: bytes) -> None:
    assert wire.blocks_from_message(session_pb2.Account(step_blocks=packed), PhaseNames()) is None
