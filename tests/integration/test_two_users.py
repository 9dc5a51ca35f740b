"""Two unprivileged users and root on one node: neither user gains anything over the other's processes."""

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.node import eventually
from tests.support.shared_node import ADA, BOB, TRAIN, Shared, line

from torchperfd_daemon.config.options import OPTIONS

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")


@pytest.fixture
def node() -> Iterator[Shared]:
    with contextlib.closing(Shared()) as made:
        yield made


def test_a_name_that_two_users_give_is_two_runs(node: Shared) -> None:
    node.start_shared()
    with node.user(ADA, TRAIN) as ada:
        assert (line(ada), line(ada)) == ("baseline", "made 1")
        with node.user(BOB, TRAIN) as bob:
            assert (line(bob), line(bob)) == (f"baseline@{BOB}", "made 1")
            line(ada, "step")
            eventually(lambda: node.runs().get("baseline") == [(0, True, 2)], 10, node.log)
            assert node.runs() == {"baseline": [(0, True, 2)], f"baseline@{BOB}": [(0, True, 1)]}
            assert node.metric("torchperfd_clients ") == 2
            assert line(bob, "leave") == "left"
        line(ada, "step")
        eventually(lambda: node.runs()["baseline"] == [(0, True, 3)], 10, node.log)
        assert node.metric("torchperfd_clients ") == 1
        # A capture of the name is asked of the process that had it first.
        with node.running(sys.executable, "-m", "torchperfd", "capture", "--run", "baseline", "--steps", "1"):
            assert line(ada, "receive") == "prepare_capture"
    log = node.log()
    assert log.count(f"the run of pid {bob.pid} is named baseline@{BOB} on this node") == 1


def test_other_user_may_read_and_not_change(node: Shared) -> None:
    node.start_shared()
    with node.user(ADA, TRAIN) as ada:
        assert (line(ada), line(ada)) == ("baseline", "made 1")
        found = node.as_user(
            BOB,
            """
import json
answers = {
    "ps": command("ps", "--json"),
    "stacks": command("stacks", "--run", "baseline"),
    "capture": command("capture", "--run", "baseline", "--with-stack"),
    "only": command("capture"),
}
print(json.dumps(answers))
""",
        )
        own = node.as_user(
            ADA, 'import json; print(json.dumps(command("stacks", "--run", "baseline", "--json")))'
        )
    code, listed = found["ps"]
    assert code == 0
    assert '"run": "baseline"' in listed or '"run":"baseline"' in listed
    assert "secret.py" not in listed
    for request in ("stacks", "capture"):
        code, words = found[request]
        assert code != 0
        assert "run baseline belongs to another user; ask that user, root or" in words
    assert found["only"][0] == 3, "it has no run of its own"
    assert own[0] in (0, 5), "of its own run each user may ask"
    audit = [words for words in node.log().splitlines() if "torchperfd.audit" in words]
    for words in (
        rf"stacks of all ranks of run baseline by uid {BOB} \(pid \d+\): refused: run baseline belongs to",
        rf"capture of all ranks of run baseline by uid {BOB} \(pid \d+\): refused: run baseline belongs to",
        rf"stacks of all ranks of run baseline by uid {ADA} \(pid \d+\): allowed, owner {ADA}",
    ):
        assert sum(bool(re.search(words, each)) for each in audit) == 1, (words, audit)


POISON = """
import json
most = 2**64 - 1
rank = Rank(SOCKET, "poison", job_name="job\\x1b[2J")
rank.receive()
name = "\\x1b]0;owned\\x07\\u202edata"
phases = [session_pb2.PhaseAccount(phase=f"{name}{n}", calls=most, ns=most) for n in range(40)]
kind = session_pb2.KindAccount(kind=1, steps=most, step_ns=most, samples=most, phases=phases,
                               sum_squares_ns2=float("nan"))
rank.say(account=session_pb2.Account(
    kinds=[kind], recorded_steps=most, flops_per_step=float("inf"), began_ns=most, ended_ns=most,
    dropped_steps={f"where{n}": most for n in range(20_000)},
))
def column(value, count=30):
    return value.to_bytes(8, "little", signed=True) * count
batch = session_pb2.StepBatch(count=30, kind=column(1), start_ns=column(10**18), duration_ns=column(2**61))
batch.phases.add(phase="\\x1b[31mred", ns=column(-(2**63)))
rank.say(steps=batch)
rank.say(state=session_pb2.StateChange(state=2, framework="\\x1b[5mblink"))
print(json.dumps("sent"), flush=True)
sys.stdin.read()
"""


def test_invalid_totals_affect_only_their_own_rank(node: Shared) -> None:
    node.start_shared()
    with node.user(ADA, TRAIN) as ada, node.user(BOB, POISON) as bob:
        assert (line(ada), line(ada), json.loads(line(bob))) == ("baseline", "made 1", "sent")
        eventually(lambda: "poison" in node.runs(), 10, node.log)
        for arguments in (
            ("ps",),
            ("ranks", "--run", "poison"),
            ("ranks", "--run", "baseline"),
            ("top", "--once"),
            ("whatif", "--run", "poison"),
            ("steps", "--run", "poison"),
            ("diagnose",),
            ("goodput",),
        ):
            done = node.command(*arguments)
            assert "Traceback" not in done.stderr
            assert not CONTROL.search(done.stdout + done.stderr), (arguments, done.stdout)
        assert node.runs()["baseline"] == [(0, True, 1)]
        page = node.get("/metrics")[1]
        assert len(re.findall(r"^torchperfd_ingest_dropped_events_total\{", page, re.MULTILINE)) <= 3
        assert not CONTROL.search(page)
    assert "Traceback" not in node.log()


FLOOD = """
import json
ranks, refused = [], []
for number in range(40):
    rank = Rank(SOCKET, f"flood{number}")
    try:
        rank.receive()
        ranks.append(rank)
    except grpc.RpcError as error:
        refused.append((error.code().name, error.details()))
sockets = []
for number in range(300):
    each = socket.socket(socket.AF_UNIX)
    each.settimeout(10)
    with_error = each.connect_ex(SOCKET)
    sockets.append(each)
closed = 0
for each in sockets[-100:]:
    try:
        closed += each.recv(1) == b""
    except OSError:
        closed += 1
print(json.dumps([len(ranks), sorted(set(map(tuple, refused))), closed]), flush=True)
sys.stdin.read()
"""


def test_a_flood_of_sessions_leaves_room_for_others(node: Shared) -> None:
    node.start_shared("--max-sessions-per-user", "8")
    with node.user(BOB, FLOOD) as bob:
        admitted, refused, closed = json.loads(line(bob))
        assert admitted == 8
        assert refused == [
            [
                "RESOURCE_EXHAUSTED",
                "this user has 8 sessions, the most that one user may have; raise max_sessions and"
                " max_sessions_per_user of torchperfd serve for more",
            ]
        ]
        # Eight and 64 more, less those of the sessions, may be open; the others were closed.
        assert closed == 100
        with node.user(ADA, TRAIN) as ada:
            assert (line(ada), line(ada)) == ("baseline", "made 1")
            eventually(lambda: node.runs().get("baseline") == [(0, True, 1)], 10, node.log)
    assert node.log().count("a session of uid") <= 5


LIE = """
import json
rank = Rank(SOCKET, "lie", pid=VICTIM, process_start_ticks=TICKS)
rank.receive()
print(json.dumps(command("stacks", "--run", "lie")), flush=True)
"""


def test_a_false_process_id_shows_nothing_of_that_process(node: Shared) -> None:
    node.start_shared()
    with node.user(ADA, TRAIN) as ada:
        line(ada)
        stat = Path(f"/proc/{ada.pid}/stat").read_text().rpartition(")")[2].split()
        code, words = node.as_user(BOB, f"VICTIM, TICKS = {ada.pid}, {stat[19]}\n{LIE}")
        assert code != 0
        assert "as_user" not in words
        page = node.get("/metrics")[1]
        assert not re.search(r'torchperfd_process_\w+\{[^}]*run="lie"', page)
    assert f"claims to be process {ada.pid}" in node.log()


def test_the_limits_are_options_of_serve() -> None:
    names = {option.key for option in OPTIONS}
    assert {"admin_group", "max_sessions", "max_sessions_per_user"} <= names
