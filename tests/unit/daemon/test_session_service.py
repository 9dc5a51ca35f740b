"""The session service over a real socket: who is let in, what is kept, what is refused."""

import asyncio
import stat
from pathlib import Path

import grpc
import pytest
from tests.support.served import GIVE_UP_S, RankStream, Served, hello, steps_message, with_daemon

from torchperfd._version import __version__
from torchperfd.v1 import contract, session_pb2
from torchperfd_daemon.service import translate
from torchperfd_daemon.store.model import State


@with_daemon
async def test_rank_is_welcomed_with_directories_and_addresses(
    served: Served, channel: grpc.aio.Channel
) -> None:
    rank = RankStream(channel)
    welcome = await rank.join()
    assert (welcome.api.min, welcome.api.max) == (contract.API_MIN, contract.API_MAX)
    assert welcome.daemon_version == __version__
    assert welcome.captures_dir == str(served.catalog.directory)
    assert welcome.metrics_url == "http://127.0.0.1:9407/metrics"
    assert list(welcome.features) == list(contract.FEATURES)
    assert served.store.connected() == served.sessions.count == 1
    await rank.leave()
    assert served.store.connected() == served.sessions.count == 0


@with_daemon
async def test_the_socket_is_the_owners_alone(served: Served, channel: grpc.aio.Channel) -> None:
    assert stat.S_IMODE(Path(served.socket).stat().st_mode) == 0o600


@with_daemon
async def test_what_a_rank_sends_is_kept(served: Served, channel: grpc.aio.Channel) -> None:
    rank = RankStream(channel)
    await rank.join()
    train, validate = session_pb2.STEP_KIND_TRAIN, session_pb2.STEP_KIND_VALIDATE
    account = session_pb2.Account(
        kinds=[
            session_pb2.KindAccount(
                kind=train,
                steps=7,
                step_ns=70,
                samples=224,
                phases=[session_pb2.PhaseAccount(phase="data", calls=7, ns=20, sum_squares_ns2=60.0)],
            ),
            session_pb2.KindAccount(kind=validate, steps=3, step_ns=9),
        ],
        recorded_steps=10,
        dropped_steps={"ring": 4},
    )
    await rank.say(
        steps_message([10**9, 5, 3 * 10**9], [train, validate, train], data=[10**8, 1, 3 * 10**8]),
        session_pb2.ClientMessage(account=account),
        session_pb2.ClientMessage(
            state=session_pb2.StateChange(
                state=session_pb2.RUN_STATE_VALIDATING, framework="light\nning" + "!" * 999
            )
        ),
        # Of a newer client: not known here, so nothing changes.
        session_pb2.ClientMessage(state=session_pb2.StateChange(state=99)),  # type: ignore[arg-type]
    )
    await rank.leave()
    [kept] = served.store.ranks()
    assert served.store.ingested_steps == 3
    assert len(kept.history) == 2, "the validation step is no training step"
    assert kept.history.mean_step_seconds() == 2.0
    assert kept.history.mean_phase_seconds() == {"data": 0.2}
    assert kept.last_step_unix_seconds == pytest.approx(1004.000000005)
    assert kept.state is State.VALIDATING
    assert kept.framework == ("light?ning" + "!" * 999)[:200]
    assert (kept.totals.train.steps, kept.totals.train.ns, kept.totals.train.samples) == (7, 70, 224)
    assert (kept.totals.train.phases["data"].calls, kept.totals.train.phases["data"].ns) == (7, 20)
    assert (kept.totals.validate.steps, kept.totals.recorded, kept.totals.dropped) == (3, 10, {"ring": 4})


@with_daemon
async def test_a_bundle_says_what_its_messages_say(served: Served, channel: grpc.aio.Channel) -> None:
    rank = RankStream(channel)
    assert contract.BUNDLE in (await rank.join()).features
    account = session_pb2.Account(recorded_steps=2, dropped_steps={"outbox": 1})
    state = session_pb2.StateChange(state=session_pb2.RUN_STATE_FINISHED)
    messages = [
        steps_message([10**9, 10**9]),
        session_pb2.ClientMessage(account=account),
        session_pb2.ClientMessage(state=state),
        session_pb2.ClientMessage(goodbye=session_pb2.Goodbye()),
        steps_message([10**9]),
    ]
    await rank.say(session_pb2.ClientMessage(bundle=session_pb2.Bundle(messages=messages)))
    assert (await rank.refused())[0] is grpc.StatusCode.OK
    [kept] = served.store.ranks()
    assert (len(kept.history), kept.totals.recorded, kept.state) == (2, 2, State.FINISHED)
    assert not kept.connected


@with_daemon
async def test_failure_of_a_script_is_kept_once(served: Served, channel: grpc.aio.Channel) -> None:
    """The first message has it; the last one, that the rank has finished, repeats it."""
    rank = RankStream(channel)
    await rank.join()
    for failure in ("", "ValueError: bad\n" + "x" * 999, "OSError: later"):
        change = session_pb2.StateChange(state=session_pb2.RUN_STATE_FINISHED, failure=failure)
        await rank.say(session_pb2.ClientMessage(state=change))
    await rank.leave()
    [kept] = served.store.ranks()
    assert kept.failure.startswith("ValueError: bad?xx")
    assert len(kept.failure) == 500
    assert kept.failed_unix_seconds > 0


@with_daemon
async def test_outcome_of_a_promise_is_kept_in_one_line(served: Served, channel: grpc.aio.Channel) -> None:
    rank = RankStream(channel)
    await rank.join()
    for outcome in ("", "your change: +18 %\n" + "x" * 999):
        change = session_pb2.StateChange(state=session_pb2.RUN_STATE_FINISHED, outcome=outcome)
        await rank.say(session_pb2.ClientMessage(state=change))
    await rank.leave()
    [kept] = served.store.ranks()
    assert kept.outcome.startswith("your change: +18 %?xx")
    assert len(kept.outcome) == 500


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        ("train.py --lr 1 --name 'a b'", "train.py --lr 1 --name 'a b'"),
        ("train.py; rm -rf $HOME `id`", "'train.py;' rm -rf '$HOME' '`id`'"),
        ("train.py 'open", ""),
        ("train.py\n--lr", ""),
        ("train.py " + "x" * 4000, ""),
    ],
)
def test_identity_command_is_safe_to_paste(command: str, kept: str) -> None:
    message = session_pb2.RankIdentity(run="a", command=command)
    assert translate.identity_from_message(message).command == kept


@with_daemon
async def test_a_bundle_within_a_bundle_is_refused(served: Served, channel: grpc.aio.Channel) -> None:
    message = steps_message([1])
    for _ in range(5):
        message = session_pb2.ClientMessage(bundle=session_pb2.Bundle(messages=[message]))
    rank = RankStream(channel)
    await rank.join()
    await rank.say(message)
    assert await rank.refused() == (grpc.StatusCode.INVALID_ARGUMENT, "a bundle holds another")
    assert served.store.ingested_steps == 0


@pytest.mark.parametrize(
    "first",
    [
        session_pb2.ClientMessage(),
        steps_message([1]),
        session_pb2.ClientMessage(goodbye=session_pb2.Goodbye()),
    ],
)
@with_daemon
async def test_a_session_begins_with_hello(
    served: Served, channel: grpc.aio.Channel, first: session_pb2.ClientMessage
) -> None:
    rank = RankStream(channel)
    await rank.say(first)
    assert await rank.refused() == (grpc.StatusCode.INVALID_ARGUMENT, "a session begins with hello")
    silent = RankStream(channel)
    await silent.call.done_writing()
    assert (await silent.refused())[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert not list(served.store.ranks())


@pytest.mark.parametrize(("low", "high"), [(0, 0), (0, contract.API_MIN - 1), (contract.API_MAX + 1, 99)])
@with_daemon
async def test_another_protocol_is_refused_naming_both_versions(
    served: Served, channel: grpc.aio.Channel, low: int, high: int
) -> None:
    message = hello()
    message.hello.api.min, message.hello.api.max = low, high
    message.hello.client_version = "9.8.7"
    rank = RankStream(channel)
    await rank.say(message)
    code, details = await rank.refused()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert details == (
        f"the client (torchperfd 9.8.7) speaks protocol {low} to {high}, this daemon (torchperfd"
        f" {__version__}) speaks {contract.API_MIN} to {contract.API_MAX}; install the same version on"
        " both sides"
    )
    assert not list(served.store.ranks())


@with_daemon
async def test_version_of_the_client_is_kept_as_one_line(served: Served, channel: grpc.aio.Channel) -> None:
    message = hello()
    message.hello.client_version = "0.2.0\nup 1"
    rank = RankStream(channel)
    await rank.say(message)
    await rank.receive()
    assert [each.client_version for each in served.store.ranks()] == ["0.2.0?up 1"]


@with_daemon
async def test_a_wider_range_that_overlaps_is_welcome(served: Served, channel: grpc.aio.Channel) -> None:
    message = hello()
    message.hello.api.max = 99
    rank = RankStream(channel)
    await rank.say(message)
    assert (await rank.receive()).HasField("welcome")
    await rank.leave()


@with_daemon
async def test_a_run_needs_a_name(served: Served, channel: grpc.aio.Channel) -> None:
    rank = RankStream(channel)
    await rank.say(hello(run=""))
    assert await rank.refused() == (grpc.StatusCode.INVALID_ARGUMENT, "the run has no name")


@pytest.mark.parametrize("size", [0, 16, 23, 25, 32])
@pytest.mark.parametrize("column", ["kind", "start_ns", "duration_ns", "phase"])
@with_daemon
async def test_a_column_of_the_wrong_length_ends_that_session_only(
    served: Served, channel: grpc.aio.Channel, column: str, size: int
) -> None:
    good, bad = RankStream(channel), RankStream(channel)
    await good.join(rank=0)
    await bad.join(rank=1)
    message = steps_message([1, 2, 3], data=[1, 1, 1])
    if column == "phase":
        message.steps.phases[0].ns = b"\1" * size
    else:
        setattr(message.steps, column, b"\1" * size)
    gone = asyncio.Event()
    served.sessions.on_change = gone.set
    await bad.say(message)
    assert await bad.refused() == (grpc.StatusCode.INVALID_ARGUMENT, f"a column of 3 steps has {size} bytes")
    await asyncio.wait_for(gone.wait(), GIVE_UP_S)
    assert [session.rank for session in served.sessions.of_run("bert-17")] == [0]
    await good.say(steps_message([1]))
    await good.leave()
    assert served.store.ingested_steps == 3 + 1
    assert [len(rank.history) for rank in served.store.ranks()] == [1, 0]


@with_daemon
async def test_times_that_overflow_are_refused_in_words(served: Served, channel: grpc.aio.Channel) -> None:
    rank = RankStream(channel)
    await rank.join()
    await rank.say(steps_message([2**63 - 1]))
    code, details = await rank.refused()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == "a step ends after the end of time"


@with_daemon
async def test_a_hostile_capture_id_is_refused_in_words(served: Served, channel: grpc.aio.Channel) -> None:
    rank = RankStream(channel)
    await rank.join()
    result = session_pb2.CaptureResult(capture_id="../../etc", ok=True, self_started=True)
    await rank.say(session_pb2.ClientMessage(capture_result=result))
    code, details = await rank.refused()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == "'../../etc' is no capture id"
    assert served.coordinator.counts.requests == {}


@with_daemon
async def test_a_capture_of_its_own_is_adopted(served: Served, channel: grpc.aio.Channel) -> None:
    rank = RankStream(channel)
    await rank.join(rank=3)
    (served.catalog.directory / "own-1").mkdir(parents=True)
    result = session_pb2.CaptureResult(
        capture_id="own-1",
        ok=True,
        start_step=40,
        steps=5,
        file="rank3.json",
        bytes=9,
        sha256="ab",
        self_started=True,
        options=session_pb2.CaptureOptions(steps=5, with_stack=True),
    )
    await rank.say(session_pb2.ClientMessage(capture_result=result))
    await rank.leave()
    record = served.catalog.get("own-1")
    assert (record.run, record.trigger, record.state.value) == ("bert-17", "script", "complete")
    assert record.step_range == (40, 45)
    assert record.options.with_stack
    assert [(trace.rank, trace.file, trace.bytes) for trace in record.ranks] == [(3, "rank3.json", 9)]


@with_daemon
async def test_overlong_and_unprintable_names_are_cut(served: Served, channel: grpc.aio.Channel) -> None:
    rank = RankStream(channel)
    await rank.join(run="r" * 5000, script="s" * 201 + ".py", job_name="two\nlines\x1b[31m", node="knüll")
    [kept] = served.store.ranks()
    assert kept.identity.run == "r" * 200
    assert kept.identity.script == "s" * 200
    assert kept.identity.job_name == "two?lines?[31m"
    assert kept.identity.node == "knüll"
    await rank.leave()


@with_daemon
async def test_reconnected_process_keeps_its_record(served: Served, channel: grpc.aio.Channel) -> None:
    """A process may connect again before its old stream has ended."""
    old, new = RankStream(channel), RankStream(channel)
    await old.join()
    await old.say(steps_message([10**9]))
    await new.join()
    await old.leave()
    assert served.sessions.count == 1, "the old stream's end is not the rank's"
    [kept] = served.store.ranks()
    assert kept.connected
    assert len(kept.history) == 1
    await new.leave()
    assert not kept.connected


@with_daemon
async def test_a_process_that_dies_has_left(served: Served, channel: grpc.aio.Channel) -> None:
    rank = RankStream(channel)
    await rank.join()
    gone = asyncio.Event()
    served.sessions.on_change = gone.set
    rank.call.cancel()
    await asyncio.wait_for(gone.wait(), GIVE_UP_S)
    assert served.sessions.count == 0
    [kept] = served.store.ranks()
    assert not kept.connected


@with_daemon
async def test_rank_that_does_not_read_delays_no_other(served: Served, channel: grpc.aio.Channel) -> None:
    rank = RankStream(channel)
    await rank.join()
    [session] = served.sessions.of_run("bert-17")
    for number in range(100):
        session.cancel(f"c{number}", "x")
    assert session.outgoing.qsize() <= 64
    assert (await rank.receive()).cancel_capture.capture_id == "c0"
    rank.call.cancel()
