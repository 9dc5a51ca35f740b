"""What a caller may do with runs that are not its own, and the log of it."""

import contextlib
import logging
import os
from collections.abc import Iterator

import grpc
import pytest
from tests.support.served import RankStream, Served, control, hello, with_daemon

from torchperfd.model.verdict_document import verdict_to_document
from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon.diagnosis.verdict import Cause
from torchperfd_daemon.errors import NoSuchTargetError, NotAllowedError, UsageError
from torchperfd_daemon.rpc.callers import Caller
from torchperfd_daemon.service.permissions import Permissions, Rights, group_id
from torchperfd_daemon.store.model import RankIdentity
from torchperfd_daemon.store.store import Store

CAPTURE = "20260726-101502-3fa1c2"
ADA, BOB, ADMINS = 61_001, 61_002, 61_009


class Callers:
    """Says that the caller is whom a test has set."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    def find(self, call: object) -> Caller:
        return self.caller


def rights(uid: int | None, *groups: int) -> Rights:
    callers = Callers(Caller(uid, 7, 1, frozenset(groups)))
    return Permissions(callers, ADMINS).of(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("caller", "is_admin", "may"),
    [
        (rights(0), True, (True, True, True)),
        (rights(os.geteuid()), True, (True, True, True)),
        (rights(BOB, ADMINS), True, (True, True, True)),
        (rights(ADA), False, (True, False, False)),
        (rights(BOB), False, (False, True, False)),
        # A user that the kernel does not name equals no user, not even itself.
        (rights(None), False, (False, False, False)),
    ],
)
def test_rights_of_a_caller_are_over_its_own_runs(
    caller: Rights, is_admin: bool, may: tuple[bool, bool, bool]
) -> None:
    assert caller.is_admin is is_admin
    assert tuple(map(caller.may_command, (ADA, BOB, None))) == may


def test_rights_over_a_run_need_all_its_users() -> None:
    rights(ADA).check("run r", [ADA, ADA])
    for uids in ([ADA, BOB], [BOB], [None], []):
        with pytest.raises(NotAllowedError, match="run r belongs to another user; ask that user, root or"):
            rights(ADA).check("run r", uids)
        rights(0).check("run r", uids)


def test_own_name_finds_a_run_that_was_named_apart() -> None:
    store = Store()
    store.join(RankIdentity("bert", 0, pid=1), uid=ADA)
    store.join(RankIdentity("bert", 0, pid=2), uid=BOB)
    runs = store.runs()
    assert [rights(uid).own_name("bert", runs) for uid in (ADA, BOB, 0)] == ["bert", f"bert@{BOB}", "bert"]
    assert rights(ADA).own_name(f"bert@{BOB}", runs) == f"bert@{BOB}"
    assert rights(ADA).own_name("gpt", runs) == "gpt"


def test_redact_verdict_leaves_source_lines_to_their_user() -> None:
    def hang() -> control_pb2.Verdict:
        where = "no step for 9 s: rank 0 is at train.py:41"
        line = control_pb2.SlowLine(file="/home/ada/train.py", line=37)
        other = control_pb2.Verdict(
            cause=Cause.HANG.value, evidence=where, summary=f"hang · {where}", line=line
        )
        return control_pb2.Verdict(
            cause=Cause.INPUT_BOUND.value, evidence="slow", summary="x · slow", others=[other], line=line
        )

    own, foreign = hang(), hang()
    rights(ADA).redact_verdict(own, [ADA])
    rights(BOB).redact_verdict(foreign, [ADA])
    assert own == hang()
    assert (foreign.evidence, foreign.summary) == ("slow", "x · slow")
    assert foreign.others[0].summary == "hang · its stacks are shown to its own user only"
    assert "train.py" not in str(foreign)


@pytest.mark.parametrize(("caller", "name"), [(ADA, "train.py"), (BOB, "SCRIPT")])
def test_redact_verdict_hides_the_name_of_the_script(caller: int, name: str) -> None:
    other = control_pb2.Verdict(fix="`torchperfd tune --only threads SCRIPT` measures")
    verdict = control_pb2.Verdict(
        fix="`torchperfd tune SCRIPT` tries settings", script="train.py", others=[other]
    )
    rights(caller).redact_verdict(verdict, [ADA])
    shown = verdict_to_document(verdict)
    assert shown["fix"] == f"`torchperfd tune {name}` tries settings"
    assert shown["others"][0]["fix"] == f"`torchperfd tune --only threads {name}` measures"
    assert ("train.py" in str(verdict)) == (caller == ADA)


@pytest.mark.parametrize(("caller", "words"), [(ADA, "OSError: /home/ada/x"), (BOB, "")])
def test_redact_verdict_hides_why_the_run_failed(caller: int, words: str) -> None:
    verdict = control_pb2.Verdict(failure="OSError: /home/ada/x")
    rights(caller).redact_verdict(verdict, [ADA])
    assert verdict.failure == words


def test_redact_verdict_hides_the_line_that_waits() -> None:
    evidence = "9 ms idle after waits, most of it in item() at train.py:50; step 7 ms, most of it in data"
    verdict = control_pb2.Verdict(
        cause=Cause.SYNCHRONISATION.value, evidence=evidence, summary=f"x · {evidence}"
    )
    rights(BOB).redact_verdict(verdict, [ADA])
    assert verdict.evidence == "9 ms idle after waits; step 7 ms, most of it in data"
    assert verdict.summary == f"x · {verdict.evidence}"


def test_redact_account_leaves_source_lines_to_their_user() -> None:
    def account() -> control_pb2.RankAccount:
        message = control_pb2.RankAccount()
        message.identity.script = "/home/ada/train.py"
        message.identity.command = "train.py --token x"
        message.failure = "OSError: /home/ada/train.py"
        message.account.sync_waits.add(file="/home/ada/train.py", line=37, call="item", ns=5)
        return message

    own, foreign = account(), account()
    rights(ADA).redact_account(own, ADA)
    rights(BOB).redact_account(foreign, ADA)
    assert own == account()
    assert "train.py" not in str(foreign)
    assert not foreign.failure
    assert [(wait.line, wait.call, wait.ns) for wait in foreign.account.sync_waits] == [(0, "item", 5)]


def test_group_id_takes_names_and_numbers() -> None:
    assert (group_id(None), group_id("0"), group_id("root")) == (None, 0, 0)
    with pytest.raises(UsageError, match="admin_group: there is no group 'no such'"):
        group_id("no such")


@pytest.fixture
def audited(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "torchperfd.audit"):
        yield caplog


@with_daemon
async def test_a_stranger_sees_a_run_and_may_not_command_it(
    served: Served, channel: grpc.aio.Channel, audited: pytest.LogCaptureFixture
) -> None:
    rank = RankStream(channel)
    await rank.say(hello(script="/home/ada/secret.py"))
    await rank.receive()
    find, served.callers.find = served.callers.find, Callers(Caller(BOB, 7)).find  # type: ignore[method-assign]
    stub = control(channel)
    [run] = (await stub.ListRuns(control_pb2.ListRunsRequest())).runs
    assert (run.run, run.ranks[0].identity.rank, run.ranks[0].identity.script) == ("bert-17", 0, "")
    steps = await stub.GetSteps(control_pb2.GetStepsRequest())
    assert steps.ranks[0].status.identity.script == ""
    account = await stub.GetRun(control_pb2.GetRunRequest(run="bert-17"))
    assert account.ranks[0].identity.script == ""
    for request in (
        control_pb2.CaptureRequest(run="bert-17", options=session_pb2.CaptureOptions(steps=3)),
        control_pb2.StacksRequest(run="bert-17"),
    ):
        method = stub.Capture if isinstance(request, control_pb2.CaptureRequest) else stub.Stacks
        call = method(request)
        assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
        assert (await call.details()).startswith("run bert-17 belongs to another user; ask")
    # Whose name is not given is not found: it has no run of its own.
    options = session_pb2.CaptureOptions(steps=3)
    for call in (
        stub.Capture(control_pb2.CaptureRequest(options=options)),
        stub.Stacks(control_pb2.StacksRequest()),
    ):
        assert await call.code() is grpc.StatusCode.NOT_FOUND
        assert (await call.details()).startswith("this node has no run of yours; `torchperfd ps` lists")
    served.callers.find = find  # type: ignore[method-assign]
    [run] = (await stub.ListRuns(control_pb2.ListRunsRequest())).runs
    assert run.ranks[0].identity.script == "/home/ada/secret.py"
    await rank.leave()
    by = f"by uid {BOB} (pid 7)"
    assert [record.getMessage() for record in audited.records if record.name == "torchperfd.audit"] == [
        f"capture of all ranks of run bert-17 {by}: refused: run bert-17 belongs to another user",
        f"stacks of all ranks of run bert-17 {by}: refused: run bert-17 belongs to another user",
        f"capture of all ranks of the caller's only run {by}: failed: this node has no run of yours",
        f"stacks of all ranks of the caller's only run {by}: failed: this node has no run of yours",
    ]


def test_audit_line_is_written_once_with_its_outcome(audited: pytest.LogCaptureFixture) -> None:
    rights = Rights(Caller(ADA, 7), is_admin=False)
    with rights.request("capture", "all ranks of run a\nb") as line:
        line.allowed([ADA, None, ADA], CAPTURE)
        line.failed(NotAllowedError("no"))
    with rights.request("download", "rank0.json"):
        pass
    with contextlib.suppress(NoSuchTargetError), rights.request("download", "rank0.json"):
        raise NoSuchTargetError("no capture")
    refused = rights.request("pin", "capture x")
    refused.failed(NotAllowedError("capture x belongs to another user", "ask that user"))
    by = f"by uid {ADA} (pid 7)"
    assert [(record.levelname, record.getMessage()) for record in audited.records] == [
        (
            "INFO",
            f"capture of all ranks of run a?b {by}: allowed, owner unknown and {ADA}, capture {CAPTURE}",
        ),
        ("INFO", f"download of rank0.json {by}: failed: the caller left before it was decided"),
        ("INFO", f"download of rank0.json {by}: failed: no capture"),
        ("WARNING", f"pin of capture x {by}: refused: capture x belongs to another user"),
    ]
