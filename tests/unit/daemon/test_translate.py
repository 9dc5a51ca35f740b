"""Between messages and the daemon's own types: nothing is lost, and no bytes break it."""

import math
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.accounts import uneven_account
from tests.support.served import columns, steps_message
from tests.support.values import some

from torchperfd.model.host_memory import HostMemory
from torchperfd.model.loader_facts import LoaderFacts
from torchperfd.model.messages import pack, unpack
from torchperfd.model.process import Coordinate, HookState
from torchperfd.model.source_lines import InputStages, SlowLine, SyncWait
from torchperfd.model.step_account import Part, PartKind
from torchperfd.model.totals import CudaMemory, GcTotals, PhaseTotals
from torchperfd.model.verdict_document import verdict_to_document
from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon.captures.attempt import Progress
from torchperfd_daemon.captures.manifest import CaptureOptions, CaptureRecord, CaptureState, RankTrace
from torchperfd_daemon.captures.rank_attempts import Ack, Result
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.fleet import translate as fleet_translate
from torchperfd_daemon.service import translate, translate_diagnosis
from torchperfd_daemon.service.translate_verdict import verdict_to_message
from torchperfd_daemon.store.history import Histogram, History
from torchperfd_daemon.store.model import KindTotal, RankIdentity, State, Totals
from torchperfd_daemon.store.store import Rank

TRAIN, VALIDATE = session_pb2.STEP_KIND_TRAIN, session_pb2.STEP_KIND_VALIDATE


def test_only_training_steps_are_taken() -> None:
    batch = steps_message([10, 20, 30, 40], [TRAIN, VALIDATE, 0, TRAIN], data=[1, 2, 3, 4]).steps
    steps = translate.training_steps_from_message(batch)
    assert steps.duration_ns == array("q", [10, 40])
    assert steps.end_unix_ns == array("q", [1_000_000_000_010, 1_000_000_000_100])
    assert steps.phases == {"data": array("q", [1, 4])}


def test_columns_that_older_clients_send_are_passed_over() -> None:
    batch = steps_message([10, 20], data=[1, 2]).steps
    column = b"\x10" + columns([7, 8])[0]
    older = b"\x12" + column + b"\x32" + column  # index and samples
    assert translate.training_steps_from_message(
        session_pb2.StepBatch.FromString(batch.SerializeToString() + older)
    ) == translate.training_steps_from_message(batch)


def test_an_empty_batch_is_no_steps() -> None:
    steps = translate.training_steps_from_message(session_pb2.StepBatch())
    assert (len(steps.duration_ns), len(steps.end_unix_ns), steps.phases) == (0, 0, {})


@given(
    count=st.integers(0, 4) | st.just(2**32 - 1),
    blobs=st.lists(st.binary(max_size=32) | st.binary(min_size=16, max_size=16), min_size=4, max_size=4),
    phase=st.text(max_size=100),
)
def test_no_bytes_in_a_batch_break_the_daemon(count: int, blobs: list[bytes], phase: str) -> None:
    kind, start, duration, column = blobs
    batch = session_pb2.StepBatch(
        count=count,
        kind=kind,
        start_ns=start,
        duration_ns=duration,
        phases=[session_pb2.PhaseColumn(phase=phase, ns=column)],
    )
    try:
        steps = translate.training_steps_from_message(batch)
    except translate.BadMessageError:
        return
    assert len(steps.duration_ns) == len(steps.end_unix_ns) <= count
    history, histogram = History(3), Histogram()
    history.append(steps)
    histogram.observe_ns(steps.duration_ns)
    assert len(history) == min(3, len(steps.duration_ns))
    assert sum(histogram.counts) == len(steps.duration_ns)


INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.tuples(st.sampled_from([TRAIN, VALIDATE]), INT64, INT64), max_size=5))
def test_well_formed_columns_are_read_exactly_or_refused(rows: list[tuple[int, int, int]]) -> None:
    kinds, starts, durations = columns(*zip(*rows, strict=True)) if rows else (b"", b"", b"")
    batch = session_pb2.StepBatch(count=len(rows), kind=kinds, start_ns=starts, duration_ns=durations)
    trained = [(start + duration, duration) for kind, start, duration in rows if kind == TRAIN]
    expected = [(min(max(end, 0), 2**62), min(max(duration, 0), 2**58)) for end, duration in trained]
    if any(not -(2**63) <= end < 2**63 for end, _ in trained):
        with pytest.raises(translate.BadMessageError, match="ends after the end of time"):
            translate.training_steps_from_message(batch)
        return
    steps = translate.training_steps_from_message(batch)
    assert list(zip(steps.end_unix_ns, steps.duration_ns, strict=True)) == expected


# What a client may truly have counted; beyond, see the test of limits.
COUNTS = st.integers(0, 2**53)
PHASES = st.builds(PhaseTotals, COUNTS, COUNTS, st.floats(0, 1e300), COUNTS, COUNTS)
KINDS = st.builds(
    KindTotal,
    COUNTS,
    COUNTS,
    COUNTS,
    st.dictionaries(st.sampled_from(["data", "forward", "other"]), PHASES),
    squares=st.floats(0, 1e300),
    micro_batches=COUNTS,
    skipped=COUNTS,
    tokens=COUNTS,
)
QUANTITIES = st.none() | st.floats(0, 1e300)
FIGURES = st.floats(0, 1e6)
LOADERS = st.builds(
    LoaderFacts,
    workers=st.integers(0, 99),
    # No CPUs at all stands for an unknown number.
    cpus=st.none() | st.floats(0, 1e3, exclude_min=True),
    draw_cpu=st.none() | FIGURES,
    rest_cpus=st.none() | FIGURES,
    batch_tensors=st.integers(0, 99),
    batch_bytes=st.integers(0, 2**40),
    receive_seconds=st.none() | FIGURES,
    worker_queued=st.none() | FIGURES,
    indexable=st.booleans(),
    batches_per_step=FIGURES,
)
TOTALS = st.builds(
    Totals,
    train=KINDS,
    validate=KINDS,
    recorded=COUNTS,
    dropped=st.dictionaries(st.sampled_from(["ring", "outbox"]), COUNTS),
    # A first step that has not been made is not reported.
    warmup=KINDS.filter(lambda kind: kind.steps > 0) | st.just(KindTotal()),
    checkpoint=st.none() | PHASES,
    gc=st.lists(st.builds(GcTotals, COUNTS, COUNTS), max_size=3).map(tuple),
    loader_ready=st.none() | st.integers(0, 2**32 - 1),
    cuda=st.none() | st.builds(CudaMemory, COUNTS, COUNTS, COUNTS),
    host_memory=st.none() | st.builds(HostMemory, COUNTS, COUNTS),
    flops_per_step=QUANTITIES,
    peak_flops=QUANTITIES,
    overhead=QUANTITIES,
    degradation_level=st.integers(0, 2**32 - 1),
    epoch=PHASES,
    train_pass=PHASES,
    validate_pass=PHASES,
    began_ns=COUNTS,
    ended_ns=COUNTS,
    loader=st.none() | LOADERS,
    hooks=st.just((HookState("loader"), HookState("forward", "no such name"))) | st.just(()),
    coordinates=st.just((Coordinate("pp", 1, 2), Coordinate("dp_shard", 0, 4))) | st.just(()),
    sync_waits=st.just((SyncWait("/home/a/train.py", 57, "item", 9), SyncWait("b.py", 1, "cpu", 8)))
    | st.just(()),
    threads=st.none() | st.integers(1, 2**16),
)


@given(TOTALS)
def test_totals_survive_the_wire(totals: Totals) -> None:
    message = session_pb2.Account.FromString(
        translate_diagnosis.totals_to_message(totals).SerializeToString()
    )
    assert translate_diagnosis.totals_from_message(message) == totals


@given(st.floats(max_value=0, exclude_max=True) | st.sampled_from([float("inf"), float("nan")]))
def test_what_is_no_quantity_is_not_known(value: float) -> None:
    message = session_pb2.Account(flops_per_step=value, peak_flops=value, overhead_ratio=value)
    totals = translate_diagnosis.totals_from_message(message)
    assert (totals.flops_per_step, totals.peak_flops, totals.overhead) == (None, None, None)


@pytest.mark.parametrize("threads", [0, 2**16 + 1, 2**32 - 1])
def test_threads_that_no_process_has_are_not_known(threads: int) -> None:
    rank = Rank(RankIdentity("bert", 0), 0.0)
    rank.totals = translate_diagnosis.totals_from_message(session_pb2.Account(threads=threads))
    assert rank.totals.threads is None
    assert not translate.rank_status_to_message(rank).HasField("threads")
    rank.totals = translate_diagnosis.totals_from_message(session_pb2.Account(threads=8))
    assert translate.rank_status_to_message(rank).threads == 8


def test_totals_out_of_range_are_limited() -> None:
    most = 2**64 - 1
    phase = session_pb2.PhaseAccount(
        phase="\x1b]0;x\x07data",
        calls=most,
        ns=most,
        sum_squares_ns2=math.inf,
        device_ns=most,
        device_calls=most,
    )
    kind = session_pb2.KindAccount(
        kind=TRAIN, steps=most, step_ns=most, samples=most, phases=[phase], sum_squares_ns2=math.nan
    )
    message = session_pb2.Account(
        kinds=[kind],
        recorded_steps=most,
        dropped_steps={"ring": most, "outbox": most, "x": most, "y": most},
        cuda=session_pb2.CudaMemory(
            allocated_bytes=most, reserved_bytes=most, peak_bytes=most, device_uuid="a\n" * 100
        ),
        gc=[session_pb2.GcAccount(calls=most, ns=most)],
        peak_flops=math.inf,
        overhead_ratio=math.nan,
        began_ns=most,
        ended_ns=most,
    )
    totals = translate_diagnosis.totals_from_message(message)
    assert totals.train.phases == {"?]0;x?data": PhaseTotals(2**53, 2**58, 1e300, 2**58, 2**53)}
    assert (totals.train.steps, totals.train.ns, totals.train.squares) == (2**53, 2**58, 0.0)
    assert totals.dropped == {"ring": 2**53, "outbox": 2**53, "other": 2**53}
    assert (totals.gc, totals.cuda) == (
        (GcTotals(2**53, 2**58),),
        CudaMemory(2**53, 2**53, 2**53, "a?" * 32),
    )
    assert (totals.peak_flops, totals.overhead) == (None, None)
    assert (totals.recorded, totals.began_ns, totals.ended_ns) == (2**53, 2**62, 2**62)
    rank = Rank(RankIdentity("bert", 0), 0.0)
    rank.totals = totals
    # What holds the limited numbers can be packed again, sums included.
    assert translate.rank_status_to_message(rank).dropped_steps == 3 * 2**53
    assert translate_diagnosis.totals_from_message(translate_diagnosis.totals_to_message(totals)) == totals


def test_columns_out_of_range_are_limited() -> None:
    steps = translate.training_steps_from_message(
        steps_message([-5, 10, 2**60], **{"da\nta": [-1, 2**63 - 1, 3]}).steps
    )
    assert steps.duration_ns == array("q", [0, 10, 2**58])
    assert steps.phases == {"da?ta": array("q", [0, 2**58, 3])}


@pytest.mark.parametrize("field", ["world_size", "local_rank", "node_rank", "pid", "process_start_ticks"])
def test_identity_numbers_out_of_range_are_limited(field: str) -> None:
    most = 2**64 - 1 if field == "process_start_ticks" else 2**32 - 1
    read = translate.identity_from_message(session_pb2.RankIdentity(run="bert", **{field: most}))  # type: ignore[arg-type]
    assert 0 <= getattr(read, field) <= 2**53
    # What takes process ids takes C integers.
    assert read.pid < 2**31


def test_a_rank_that_no_run_has_is_refused() -> None:
    with pytest.raises(translate.BadMessageError, match="no run has a rank 4294967295"):
        translate.identity_from_message(session_pb2.RankIdentity(run="bert", rank=2**32 - 1))


@pytest.mark.parametrize("cpus", [-1.0, float("nan"), float("inf"), 1e300])
def test_loader_facts_impossible_figures_are_not_known(cpus: float) -> None:
    for loader in (
        session_pb2.LoaderUse(workers=1, cpus=cpus),
        session_pb2.LoaderUse(stages=session_pb2.InputStages(idle=cpus)),
    ):
        assert translate_diagnosis.totals_from_message(session_pb2.Account(loader=loader)).loader is None


def test_totals_take_bounded_memory() -> None:
    kind = session_pb2.KindAccount(
        kind=TRAIN, phases=[session_pb2.PhaseAccount(phase=f"{n}" * 100, calls=1) for n in range(500)]
    )
    message = session_pb2.Account(
        kinds=[kind],
        warmup=kind,
        dropped_steps={f"{n}-" * 30: 1 for n in range(100)},
        gc=[session_pb2.GcAccount(calls=1)] * 100,
        hooks=[session_pb2.HookState(name=f"{n}" * 100, reason=f"{n}" * 1000) for n in range(500)],
        coordinates=[session_pb2.Coordinate(dimension="d" * 100, rank=1, size=n) for n in range(500)],
        sync_waits=[session_pb2.SyncWait(file="f\n" * 999, call="c\x1b" * 99, ns=2**64 - 1)] * 99,
    )
    totals = translate_diagnosis.totals_from_message(message)
    for total in (totals.train, totals.warmup):
        assert len(total.phases) <= 32
        assert max(map(len, total.phases)) <= 64
    assert len(totals.gc) <= 4
    assert len(totals.hooks) <= 64
    assert {(len(hook.name), len(hook.reason)) for hook in totals.hooks} == {(64, 256)}
    assert [(len(each.dimension), each.size) for each in totals.coordinates] == [
        (64, n) for n in range(2, 16)
    ]
    assert len(totals.sync_waits) == 8
    assert {(len(wait.file), len(wait.call)) for wait in totals.sync_waits} == {(1000, 64)}
    assert all(wait.call.isprintable() and wait.file.isprintable() for wait in totals.sync_waits)
    assert totals.sync_wait_ns < 2**63
    assert len(totals.dropped) <= 8
    assert max(map(len, totals.dropped)) <= 32


def test_an_identity_survives_the_wire() -> None:
    own = RankIdentity(
        "bert-17",
        3,
        8,
        1,
        2,
        "bert",
        "node-a",
        4026531836,
        99,
        123456,
        "train.py",
        "2.13",
        "3.11",
        "77",
        "uid",
    )
    assert translate.identity_from_message(pack(session_pb2.RankIdentity, own)) == own


@given(st.text())
def test_client_text_breaks_no_line_and_drives_no_terminal(text: str) -> None:
    identity = translate.identity_from_message(session_pb2.RankIdentity(run="r", script=text))
    ack = unpack(session_pb2.CaptureAck(reason=text), Ack)
    result = unpack(session_pb2.CaptureResult(reason=text, file=text), Result)
    for kept in (identity.script, ack.reason, result.reason, result.file):
        assert kept.isprintable()
        assert len(kept) <= 500
    assert "/" not in result.file, "it is a name below the capture's directory"


def test_a_result_is_what_the_rank_said() -> None:
    message = session_pb2.CaptureResult(
        ok=True, retry=True, start_step=7, file="rank0.json", bytes=9, sha256="ab" * 32, reason="why é"
    )
    result = unpack(message, Result)
    assert (result.ok, result.retry, result.start_step, result.bytes) == (True, True, 7, 9)
    assert (result.file, result.sha256, result.reason) == ("rank0.json", "ab" * 32, "why é")
    assert unpack(session_pb2.CaptureResult(file="../../etc/passwd"), Result).file == "passwd"


@pytest.mark.parametrize("state", State)
def test_every_state_has_its_message(state: State) -> None:
    value = session_pb2.RunState.Value(f"RUN_STATE_{state.name}")
    assert translate.state_from_message(value) is state


def test_an_unknown_state_is_none() -> None:
    assert translate.state_from_message(0) is None
    assert translate.state_from_message(99) is None


def test_a_verdict_names_its_rank_or_minus_one() -> None:
    verdict = Verdict(Cause.INPUT_BOUND, "r", "node-a", 3, "data", "evidence", 0.5, "next")
    message = verdict_to_message(verdict)
    assert (message.cause, message.rank, message.summary) == (
        "input-bound",
        3,
        "input-bound · rank 3 on node-a · evidence",
    )
    assert verdict_to_message(Verdict(Cause.NONE, "r", "", None, "", "", 0.0, "")).rank == -1


def test_slow_line_survives_the_way_through_another_node() -> None:
    line = SlowLine(
        "fetch", 0.75, "/job/data.py", 37, "__getitem__", "decode", 0.5, 20, True, caller="a.py:1 in f"
    )
    verdict = Verdict(Cause.INPUT_BOUND, "r", "", None, "data", "evidence", 0.5, "", line=line)
    verdict = replace(verdict, stages=InputStages(2, 30, 0.05, 0.02, idle=0.1))
    message = verdict_to_message(verdict)
    assert fleet_translate.verdict_from_message(message).line == line
    assert fleet_translate.verdict_from_message(message).stages == verdict.stages
    message.line.share, message.line.file, message.stages.idle = math.nan, "a\x1b[2J", math.inf
    assert fleet_translate.verdict_from_message(message).stages is None
    tidied = some(fleet_translate.verdict_from_message(message).line)
    assert (tidied.share, tidied.file) == (0.0, "a?[2J")


def test_account_and_note_survive_the_way_through_another_node() -> None:
    account = uneven_account()
    verdict = Verdict(Cause.UNKNOWN, "r", "", None, "", "", 0.0, "", account=account, note="busy node")
    message = verdict_to_message(verdict)
    assert fleet_translate.verdict_from_message(message).account == account
    assert fleet_translate.verdict_from_message(message).note == "busy node"
    message.note, message.account.parts[0].kind = "a\x1b[2J", "newer"
    message.account.parts[0].seconds, message.account.parts[1].name = math.nan, "b\x1b[2J"
    tidied = fleet_translate.verdict_from_message(message)
    assert tidied.note == "a?[2J"
    assert tidied.account is not None
    assert tidied.account.parts[0] == Part(PartKind.UNNAMED, "", 0.0)
    assert tidied.account.parts[1].name == "b?[2J"
    message.account.step_seconds = math.inf
    assert fleet_translate.verdict_from_message(message).account is None


@pytest.mark.parametrize("state", CaptureState)
def test_progress_is_reported_per_rank(state: CaptureState) -> None:
    record = CaptureRecord(
        "one",
        "r",
        "command",
        1.0,
        state,
        "why",
        (120, 125),
        CaptureOptions(5),
        [RankTrace(2, state, "so", "rank2.json", 9, "ab", pause_seconds=1.5)],
    )
    progress = Progress(record, Path("/captures/one"), timed_out=True, next_steps={2: 121})
    message = translate.progress_to_message(progress)
    assert message == control_pb2.CaptureProgress(
        capture_id="one",
        state=control_pb2.CaptureState.Value(f"CAPTURE_STATE_{state.name}"),
        reason="why",
        start_step=120,
        directory="/captures/one",
        timed_out=True,
        run="r",
        steps=5,
        ranks=[
            control_pb2.CaptureRank(
                rank=2,
                state=control_pb2.CaptureState.Value(f"CAPTURE_STATE_{state.name}"),
                reason="so",
                file="rank2.json",
                bytes=9,
                sha256="ab",
                next_step=121,
                pause_seconds=1.5,
            )
        ],
    )


def test_capture_options_survive_the_wire() -> None:
    for own in (
        CaptureOptions(),
        CaptureOptions(9, True, False, True),
        CaptureOptions(1, False, True, False),
    ):
        assert translate.capture_options_from_message(own.to_message()) == own


def test_blocks_of_steps_are_passed_on_unless_too_large() -> None:
    for packed, kept in ((b"any", b"any"), (bytes(65 << 10), b"")):
        totals = translate_diagnosis.totals_from_message(session_pb2.Account(step_blocks=packed))
        assert totals.step_blocks == kept
        assert translate_diagnosis.totals_to_message(totals).step_blocks == kept


def test_share_is_of_the_verdicts_own_step() -> None:
    """111 ms of a 163 ms step is 68 %, however long the steps are by now."""
    document = verdict_to_document(
        control_pb2.Verdict(cause="input-bound", rank=-1, cost_seconds_per_step=0.111, step_seconds=0.163)
    )
    assert document["card"]["heading"] == "input-bound · 68% of the step"
    assert document["step_seconds"] == 0.163
