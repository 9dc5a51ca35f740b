"""A table of what one user of a node tries against another, on a node where links are not protected.

Ada trains and owns a capture; Bob, who has no privileges, attacks; root runs the daemon. Each row has what
Bob tries, what must come of it, and that Ada or root can do the same. Ada's rank still reports after each.
"""

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.integration.test_set_user_id import CLIENT, ROOTS, build_program
from tests.support.node import eventually, free_port
from tests.support.shared_node import ADA, BOB, COMMANDS, TRAIN, Shared, asked, line

from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState, RankTrace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users"),
    pytest.mark.needs("gcc"),
]

CAPTURE = "20260726-101502-3fa1c2"
BESIDE = "20260726-111502-3fa1c2"
TRACE = b'{"traceEvents": [{"name": "secret_kernel_of_ada"}]}'
MAX_SESSIONS = 24
SETTINGS = (
    Path("/proc/sys/fs/protected_symlinks"),
    Path("/proc/sys/fs/protected_fifos"),
    Path("/proc/sys/fs/protected_regular"),
)


@dataclass
class Place:
    """The node, its users' processes, and names that the code of a row may use.

    Attributes:
        names: Constants at the head of each code.
    """

    node: Shared
    training: "subprocess.Popen[str]"
    users: dict[int, "subprocess.Popen[str]"]
    names: dict[str, Any]
    made: int = 1
    notes: dict[str, Any] = field(default_factory=dict)

    def ask(self, uid: int, code: str) -> Any:
        """Have a user's process run code; return the ``result`` that it leaves."""
        head = "".join(f"{name} = {value!r}\n" for name, value in self.names.items())
        return asked(self.users[uid], f"{head}{PRELUDE}{code}")

    def check_unharmed(self) -> None:
        """Make sure that Ada's rank reports, and that her commands show it."""
        self.made += 1
        assert line(self.training, "step") == f"made {self.made}"
        code, listed = self.ask(ADA, 'result = command("ps", "--json")')
        assert code == 0
        ranks = next(run["ranks"] for run in json.loads(listed)["runs"] if run["run"] == "baseline")
        assert [(rank["rank"], rank["connected"]) for rank in ranks] == [(0, True)]


PRELUDE = r'''
import contextlib, http.client, json, struct, threading
from torchperfd.v1 import session_pb2_grpc
os.environ.pop("TORCHPERFD_CAPTURES_DIR", None)

def tried(work):
    """Return the outcome of work, or the name of what it raises."""
    try:
        return work()
    except Exception as error:
        return type(error).__name__

def refused(*messages, **identity):
    """Open a session, send messages, and return how the daemon ends it."""
    rank = Rank(SOCKET, **identity)
    try:
        rank.receive()
        for message in messages:
            rank.say(**message)
        while True:
            rank.receive()
    except StopIteration:
        return "OK", ""
    except grpc.RpcError as error:
        return error.code().name, error.details()
    finally:
        rank.channel.close()

def get(path, method="GET", body=None, **headers):
    """Return the status of a request over HTTP."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=20)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, named)
        answer = connection.getresponse()
        return answer.status, answer.read(300).decode("utf-8", "replace")
    finally:
        connection.close()

def rpc(name, request):
    """Return the status of a call of the control service."""
    with grpc.insecure_channel(f"unix:{SOCKET}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            answer = getattr(control_pb2_grpc.ControlStub(channel), name)(request, timeout=20)
            return "OK", len([*answer]) if hasattr(answer, "__next__") else str(answer)
        except grpc.RpcError as error:
            return error.code().name, error.details()
'''


@dataclass(frozen=True)
class Attack:
    """A row of the table.

    Attributes:
        tried: Code of Bob's, which leaves a ``result``.
        outcome: Whether that is as it must be.
        logged: What a line of the daemon's log says then; empty if it needs none.
        own: Code of Ada's, who may do the same.
        allowed: Whether its result is as it must be.
        root: Checks of this process, which is root's.
    """

    name: str
    tried: str
    outcome: Callable[[Any], bool]
    logged: str = ""
    own: str = ""
    allowed: Callable[[Any], bool] = bool
    root: Callable[[Place], object] | None = None


PS_IN_TIME = """
began = time.monotonic()
result = command("ps")[0] == 0 and time.monotonic() - began < 5
"""


def another_users(result: Any) -> bool:
    code, text = result
    return code != 0 and "belongs to another user" in text


def denied(result: Any) -> bool:
    return result in ("PermissionError", ["PermissionError"] * len(result))


def answered(result: Any) -> bool:
    return "belongs to another user" not in str(result)


ATTACKS = [
    # Another user's processes.
    Attack(
        "stacks",
        'result = command("stacks", "--run", "baseline", "--timeout", "1")',
        another_users,
        "stacks of all ranks of run baseline by uid {BOB} (pid {pid}): refused: run baseline belongs to",
        'result = command("stacks", "--run", "baseline", "--timeout", "1")',
        lambda result: result[0] in (0, 5) and answered(result),
    ),
    Attack(
        "stacks by a signal",
        'result = command("stacks", "--run", "baseline", "--signal", "--timeout", "1")',
        another_users,
        "stacks by signal of all ranks of run baseline by uid {BOB} (pid {pid}): refused",
    ),
    Attack(
        "capture",
        'result = command("capture", "--run", "baseline", "--with-stack")',
        another_users,
        "capture of all ranks of run baseline by uid {BOB} (pid {pid}): refused: run baseline belongs to",
        'result = command("capture", "--run", "baseline", "--steps", "1", "--timeout", "1")',
        answered,
    ),
    Attack(
        "capture without a name",
        'result = command("capture")',
        lambda result: result[0] == 3,
        "capture of all ranks of the caller's only run by uid {BOB} (pid {pid}): failed",
    ),
    Attack(
        "process id of another user",
        """
rank = Rank(SOCKET, "thief", pid=PID, process_start_ticks=0)
rank.receive()
result = command("stacks", "--run", "thief", "--timeout", "1"), command("ps")
rank.leave()
""",
        lambda result: "report" not in result[0][1] and "thief" in result[1][1],
        "rank 0 of run thief claims to be process",
    ),
    Attack(
        "rank of another user's run",
        """
rank = Rank(SOCKET, "baseline")
result = rank.receive().welcome.run
rank.leave()
""",
        lambda result: result == f"baseline@{BOB}",
        f"is named baseline@{BOB} on this node",
    ),
    Attack(
        "order of a capture from rank 0 of that run",
        """
rank = Rank(SOCKET, "baseline")
rank.receive()
rank.say(capture_order=session_pb2.CaptureOrder(
    order_id=1, options=session_pb2.CaptureOptions(steps=1), timeout_seconds=1))
result = rank.receive().capture_order_result.reason or "begun for its own rank"
time.sleep(1.5)
rank.leave()
""",
        bool,
        root=lambda place: "prepare_capture" not in place.node.log(),
    ),
    Attack(
        "stacks of a set-user-ID program",
        'result = command("stacks", "--run", "suid", "--timeout", "3", "--signal")[1]',
        lambda text: "password_of_root" not in text,
        root=lambda place: _check("password_of_root" not in _stacks_of_set_user_id_program(place)),
    ),
    # Names and numbers.
    Attack(
        "control characters in names",
        r"""
rank = Rank(SOCKET, "$(id)\x1b]0;P\x07\n\u202e;x", job_name="j\x1b[2J", script="s\n")
rank.receive()
column = lambda value: struct.pack("<q", value)
rank.say(steps=session_pb2.StepBatch(count=1, kind=column(1), start_ns=column(time.time_ns()),
    duration_ns=column(10**7),
    phases=[session_pb2.PhaseColumn(phase="p\x1b[2J\"}\n<img src=x>\u202e", ns=column(9 * 10**6))]))
time.sleep(1)
result = [command("ps")[1], command("ranks")[1], command("steps", "--run", "$(id)")[1], get("/metrics")[1]]
rank.leave()
""",
        lambda texts: not any(each in text for text in texts for each in "\x1b\x07\u202e\r"),
        own='result = command("ps")[1] + command("ranks")[1]',
        allowed=lambda text: "baseline" in text and "\x1b" not in text,
    ),
    Attack(
        "line break in a request, for the log",
        r'result = command("stacks", "--run", "baseline\nINFO torchperfd.audit: forged")',
        lambda result: result[0] != 0,
        "stacks of all ranks of run baseline?INFO",
        root=lambda place: _check("\nINFO torchperfd.audit: forged" not in place.node.log()),
    ),
    Attack(
        "totals that no training has",
        """
most = 2**64 - 1
rank = Rank(SOCKET, "poison")
rank.receive()
rank.say(account=session_pb2.Account(recorded_steps=most, flops_per_step=float("inf"), began_ns=most,
    kinds=[session_pb2.KindAccount(kind=1, steps=most, step_ns=most, sum_squares_ns2=float("nan"))],
    dropped_steps={f"where{n}": most for n in range(20_000)}))
time.sleep(1)
result = get("/metrics")[0], command("ps")[0]
rank.leave()
""",
        lambda result: result == [200, 0],
    ),
    # Floods.
    Attack(
        "message that is too large",
        """
account = session_pb2.Account(hooks=[session_pb2.HookState(name="x" * 2**21)])
result = refused({"account": account}, run="large")
""",
        lambda result: result[0] == "INVALID_ARGUMENT",
        "is refused: a message of",
    ),
    Attack(
        "bundles in bundles",
        """
inner = session_pb2.ClientMessage(bundle=session_pb2.Bundle())
result = refused({"bundle": session_pb2.Bundle(messages=[inner])}, run="nested")
""",
        lambda result: result[0] == "INVALID_ARGUMENT",
    ),
    Attack(
        "sessions beyond the limit",
        f"""
ranks = [Rank(SOCKET, f"many{{n}}") for n in range({MAX_SESSIONS} + 4)]
codes = []
for rank in ranks:
    try:
        rank.receive()
        codes.append("OK")
    except grpc.RpcError as error:
        codes.append(error.code().name)
for rank in ranks:
    rank.channel.close()
result = sorted(set(codes)), codes.count("OK")
""",
        lambda result: result == [["OK", "RESOURCE_EXHAUSTED"], MAX_SESSIONS],
        "a session of uid {BOB} (pid {pid}) is refused",
        'result = refused({"goodbye": session_pb2.Goodbye()}, run="another")[0]',
        lambda code: code == "OK",
    ),
    Attack(
        "connections without data",
        """
held = []
for _ in range(200):
    held.append(socket.socket(socket.AF_UNIX))
    held[-1].settimeout(1)
    tried(lambda: held[-1].connect(SOCKET))
time.sleep(0.5)
result = sum(tried(lambda each=each: each.recv(1)) == "TimeoutError" for each in held[:3])
for each in held:
    each.close()
""",
        lambda open_ones: open_ones <= 3,
        "a connection of uid {BOB} (pid {pid}) is refused",
        'result = command("ps")[0] == 0',
    ),
    Attack(
        "bytes that are no gRPC",
        """
with socket.socket(socket.AF_UNIX) as raw:
    raw.connect(SOCKET)
    raw.sendall(os.urandom(4096))
    raw.settimeout(20)
    result = tried(lambda: len(raw.recv(65536)))
""",
        lambda result: result != "TimeoutError",
    ),
    Attack(
        "commands beyond the rate",
        """
with grpc.insecure_channel(f"unix:{SOCKET}") as channel:
    stub = control_pb2_grpc.ControlStub(channel)
    calls = [stub.ListRuns.future(control_pb2.ListRunsRequest(), timeout=60) for _ in range(600)]
    codes = [call.code().name for call in calls]
result = sorted(set(codes))
""",
        lambda codes: "RESOURCE_EXHAUSTED" in codes,
        own=PS_IN_TIME,
    ),
    Attack(
        "steps beyond the rate",
        """
count = 10_000
column = lambda value: struct.pack("<q", value) * count
batch = session_pb2.StepBatch(
    count=count, kind=column(1), start_ns=column(time.time_ns()), duration_ns=column(10**6))
rank = Rank(SOCKET, "fast")
rank.receive()
for _ in range(40):
    rank.say(steps=batch)
time.sleep(3)
result = "sent"
rank.channel.close()
""",
        bool,
        "user {BOB} is slowed: more than 40,000 steps per second",
        own=PS_IN_TIME,
    ),
    Attack(
        "peers beyond the limit, and of other services",
        """
ranks = [Rank(SOCKET, "peers", rank=number, world_size=2) for number in range(2)]
for number, rank in enumerate(ranks):
    rank.receive()
    rank.say(job_daemons=session_pb2.JobDaemons(addresses=[f"127.0.0.1:{SERVICE_PORT}", "169.254.169.254:80",
        *(f"10.{number}.{n // 250}.{n % 250}:{SERVICE_PORT}" for n in range(9_999))]))
time.sleep(1)
result = command("ps", "--fleet")[0]
for rank in ranks:
    rank.leave()
""",
        lambda code: code == 0,
        "addresses that rank",
        'result = command("ps", "--fleet")[0] == 0',
        root=lambda place: _check(not _has_caller(place.notes["service"])),
    ),
    # The page.
    Attack(
        "event streams",
        """
held = []
for _ in range(40):
    held.append(socket.create_connection(("127.0.0.1", PORT)))
    held[-1].sendall(b"GET /api/v1/events HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
globals().setdefault("kept", []).extend(held)
import builtins
builtins.held_streams = held
time.sleep(1)
result = "open"
""",
        bool,
        root=lambda place: _check(_stream(place) == 200),
    ),
    Attack(
        "numbers of 26 and of 5,000 digits",
        """
result = [get(f"/api/v1/events?ranks=0-{value}")[0] for value in ("0" * 9 + "9" * 17, "9" * 5000)]
""",
        lambda codes: codes == [400, 400],
        own='result = get("/api/v1/runs/baseline/history?ranks=0")[0] == 200',
        root=lambda place: _check("Traceback" not in place.node.log()),
    ),
    Attack(
        "metrics by another site's name",
        'result = [get(path, Host="evil.example")[0] for path in ("/metrics", "/", "/api/v1/runs")]',
        lambda codes: codes == [421] * 3,
        own='result = get("/metrics")[0] == 200',
    ),
    Attack(
        "acting without the token, with a wrong one, and from another site",
        """
path = "/api/v1/runs/baseline/capture"
result = [get(path, "POST", "{}")[0], get(path, "POST", "{}", X_Torchperfd_Token="a" * 43)[0],
    get(path, "POST", "{}", Origin="http://evil.example")[0],
    get(f"/api/v1/captures/{CAPTURE}/files/rank0.json")[0]]
""",
        lambda codes: codes == [401, 401, 403, 401],
        root=lambda place: _check(
            place.node.get(
                f"/api/v1/captures/{CAPTURE}/files/rank0.json", {"x-torchperfd-token": _token(place)}
            )
            == (200, TRACE.decode())
        ),
    ),
    Attack(
        "paths that leave the page",
        """
result = [get(path)[0] for path in ("/assets/../../../../etc/passwd", "/assets/%2e%2e/%2e%2e/etc/passwd",
    "/api/v1/captures/../../etc/passwd", "/api/v1/captures/..%2f..%2fetc")]
""",
        lambda codes: set(codes) <= {401, 404},
    ),
    Attack(
        "requests that are never finished",
        """
held = []
for _ in range(300):
    held.append(socket.create_connection(("127.0.0.1", PORT)))
    held[-1].sendall(b"GET /metrics HTTP/1.1\\r\\nHost: localhost\\r\\nX-Slow: ")
began = time.monotonic()
result = get("/metrics")[0], time.monotonic() - began < 5
for each in held:
    each.close()
""",
        lambda result: result == [200, True],
    ),
    # Files of the daemon.
    Attack(
        "files of the daemon's directory",
        """
directory = Path(SOCKET).parent
result = [tried(work) for work in (
    (directory / "page.token").read_text, (directory / "d.sock.page.token").read_text, Path(SOCKET).unlink,
    (directory / "planted").touch,
    lambda: socket.socket(socket.AF_UNIX).connect(str(directory / ".d.sock.rpc")))]
""",
        lambda result: set(result) <= {"PermissionError", "FileNotFoundError"},
        root=lambda place: _check(bool(_token(place))),
    ),
    Attack(
        "trace of another user, from the disk",
        """
folder = Path(CAPTURES, CAPTURE)
result = [tried(work) for work in ((folder / "rank0.json").read_bytes, (folder / "manifest.json").read_bytes,
    lambda: os.listdir(CAPTURES), lambda: os.listdir(folder))]
""",
        denied,
        root=lambda place: _check((place.node.captures / CAPTURE / "rank0.json").read_bytes() == TRACE),
    ),
    Attack(
        "files planted in another user's capture",
        """
folder = Path(CAPTURES, CAPTURE)
result = [tried(work) for work in (
    lambda: (folder / "analysis.json").write_text('{"forged": "by bob"}'), (folder / ".pinned").touch,
    lambda: os.symlink("/etc/shadow", folder / "rank1.json"), lambda: os.mkfifo(folder / "rank2.json"),
    (folder / "rank0.json").unlink, lambda: os.rename(folder, Path(CAPTURES, "mine")))]
""",
        denied,
    ),
    Attack(
        "deep directory in the place of a removed capture",
        """
def deep():
    os.mkdir(Path(CAPTURES, ".removed-deep"))
result = [tried(work) for work in (
    deep, lambda: os.mkdir(Path(CAPTURES, BESIDE)), lambda: os.mkfifo(Path(CAPTURES, "f")))]
""",
        denied,
    ),
    Attack(
        "download of another user's capture",
        'result = rpc("Download", control_pb2.DownloadRequest(capture_id=CAPTURE, file="rank0.json"))',
        lambda result: result[0] == "PERMISSION_DENIED" and "belongs to another user" in result[1],
        f"of capture {CAPTURE} by uid {{BOB}} (pid {{pid}}): refused: capture {CAPTURE} belongs to",
        'result = rpc("Download", control_pb2.DownloadRequest(capture_id=CAPTURE, file="rank0.json"))',
        lambda result: result[0] == "OK",
    ),
    Attack(
        "download of a file beyond the capture",
        """
result = [rpc("Download", control_pb2.DownloadRequest(capture_id=name, file=file))[0] for name, file in (
    (CAPTURE, "../../page.token"), ("..", "page.token"), ("../" + CAPTURE, "rank0.json"),
    (CAPTURE, "/etc/shadow"))]
""",
        lambda codes: set(codes) <= {"PERMISSION_DENIED", "NOT_FOUND", "INVALID_ARGUMENT"},
    ),
    Attack(
        "list of captures",
        'result = command("captures", "list")',
        lambda result: CAPTURE not in result[1],
        own='result = command("captures", "list")',
        allowed=lambda result: result[0] == 0 and CAPTURE in result[1],
    ),
    Attack(
        "copy of another user's capture",
        'result = command("captures", "get", CAPTURE, "--output", PUBLIC + "/stolen")',
        lambda result: result[0] != 0 and "secret" not in result[1],
        root=lambda place: _check(not [*Path(place.names["PUBLIC"]).glob("stolen/**/*.json")]),
        own=f"""
code, text = command("captures", "get", CAPTURE, "--output", PUBLIC + "/own")
files = [path.read_bytes() == {TRACE!r} for path in Path(PUBLIC, "own").glob("**/rank0.json")]
result = files or text
""",
        allowed=lambda same: same == [True],
    ),
    Attack(
        "pin of another user's capture",
        'result = rpc("PinCapture", control_pb2.PinCaptureRequest(capture_id=CAPTURE, pinned=True))',
        lambda result: result[0] == "PERMISSION_DENIED",
        f"pin of capture {CAPTURE} by uid {{BOB}} (pid {{pid}}): refused: capture {CAPTURE} belongs to",
        'result = [command("captures", name, CAPTURE)[0] for name in ("pin", "unpin")] == [0, 0]',
    ),
    Attack(
        "removal of another user's capture",
        """
result = [command("captures", "rm", CAPTURE)[0],
    rpc("RemoveCapture", control_pb2.RemoveCaptureRequest(capture_id=CAPTURE))[0]]
""",
        lambda codes: codes[0] != 0 and codes[1] == "PERMISSION_DENIED",
        f"removal of capture {CAPTURE} by uid {{BOB}} (pid {{pid}}): refused: capture {CAPTURE} belongs to",
        'result = command("captures", "rm", "--dry-run", CAPTURE)[0] == 0',
        root=lambda place: _check((place.node.captures / CAPTURE / "rank0.json").exists()),
    ),
    Attack(
        "files handed over as those of another user's capture",
        """
from torchperfd.v1 import contract
def hand_over(token):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(SOCKET)
        connection.sendall(contract.HANDOVER_GREETING)
        connection.recv(len(contract.HANDOVER_READY), socket.MSG_WAITALL)
        with open("/etc/hostname") as file:
            message = session_pb2.CaptureHandover(token=token, capture_id=CAPTURE, files=["rank0.json"])
            content = message.SerializeToString()
            socket.send_fds(connection, [len(content).to_bytes(4, "big")], [file.fileno()])
            connection.sendall(content)
            size = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
            answer = connection.recv(size, socket.MSG_WAITALL)
            return session_pb2.CaptureHandoverResult.FromString(answer).reason
rank = Rank(SOCKET, "baseline")
token = rank.receive().welcome.handover_token
result = [hand_over(token), hand_over("a" * len(token)), hand_over("")]
rank.leave()
""",
        lambda reasons: all(reasons) and len(reasons) == 3,
        "files of a capture of uid {BOB} (pid {pid}) are not taken over",
        root=lambda place: _check((place.node.captures / CAPTURE / "rank0.json").read_bytes() == TRACE),
    ),
    Attack(
        "cancellation of a capture that another user waits for",
        'result = rpc("CancelCapture", control_pb2.CancelCaptureRequest(capture_id=CAPTURE))[0]',
        lambda code: code in ("PERMISSION_DENIED", "NOT_FOUND"),
        f"cancellation of capture {CAPTURE} by uid {{BOB}}",
    ),
    # Code and daemons of the attacker's.
    Attack(
        "false daemon",
        """
path = PUBLIC + "/false.sock"
import builtins
builtins.false_daemon = listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen()
os.chmod(path, 0o777)
result = path
""",
        bool,
        own='result = command("ps", "--socket", PUBLIC + "/false.sock")',
        allowed=lambda result: (result[0] == 4 and f"user {BOB}" in result[1]) or str(BOB) in result[1],
    ),
    Attack(
        "modules in the directory where another user starts a command",
        """
for name in ("torchperfd", "grpc", "torchperfd_daemon", "torchperfd_cli", "runpy", "click"):
    code = f"open({PUBLIC + '/ran'!r}, 'a').write('ran')"
    Path(PUBLIC, f"{name}.py").write_text(code)
result = "planted"
""",
        bool,
        root=lambda place: _start_in(place, Path(place.names["PUBLIC"])),
    ),
]


def _check(holds: bool) -> None:
    assert holds


def _token(place: Place) -> str:
    [path] = [*place.node.directory.glob("*page.token")]
    return path.read_text().strip()


def _has_caller(listener: socket.socket) -> bool:
    listener.settimeout(0.2)
    try:
        listener.accept()[0].close()
    except TimeoutError:
        return False
    return True


def _stream(place: Place) -> int:
    """Return the status of an event stream that the holder of the token opens."""
    with socket.create_connection(("127.0.0.1", place.node.metrics_port), 20) as connection:
        request = (
            f"GET /api/v1/events HTTP/1.1\r\nhost: localhost\r\nx-torchperfd-token: {_token(place)}\r\n\r\n"
        )
        connection.sendall(request.encode())
        return int(connection.recv(200).split()[1])


def _stacks_of_set_user_id_program(place: Place) -> str:
    """Return all that Bob's commands show of a client of his that has become a program of root's."""
    program = build_program(place.node.directory)
    constants = f"PROGRAM, PYTHON, ROOTS = {str(program)!r}, {sys.executable!r}, {ROOTS!r}\n"
    with place.node.user(BOB, constants + CLIENT) as client:
        assert int(line(client)) == client.pid
        assert line(client, "exec") == "up"
        shown = [
            place.ask(BOB, 'result = command("stacks", "--run", "suid", "--signal")[1]') for _ in range(3)
        ]
        ended = f"rank 0 of run suid, uid {BOB} (pid {client.pid}): the process has changed users"
        eventually(lambda: ended in place.node.log(), 20, place.node.log)
        client.kill()
    return "".join(shown)


def _start_in(place: Place, directory: Path) -> None:
    script = place.node.directory / "other" / "train.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text("print('trained')\n")
    torchperfd = Path(sys.executable).with_name("torchperfd")
    for command in (
        (torchperfd, "run", "--quiet", script),
        (torchperfd, "ps"),
        (torchperfd, "doctor"),
    ):
        done = subprocess.run(
            [*map(str, command)],
            cwd=directory,
            env=place.node.env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode in (0, 1), done.stderr
    assert not (directory / "ran").exists()


@pytest.fixture(scope="module")
def links_unprotected() -> Iterator[None]:
    """Have the kernel protect no links, FIFOs and files in sticky directories, where it lets us."""
    before: dict[Path, str] = {}
    for setting in SETTINGS:
        with contextlib.suppress(OSError):
            before[setting] = setting.read_text()
            setting.write_text("0")
    yield
    for setting, value in before.items():
        with contextlib.suppress(OSError):
            setting.write_text(value)


@pytest.fixture(scope="module")
def place(links_unprotected: None) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(contextlib.closing(Shared()))
        service = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        # As versions before this one left it.
        node.captures.mkdir()
        node.captures.chmod(0o1777)
        node.start_shared(
            *("--max-sessions-per-user", str(MAX_SESSIONS)),
            *("--fleet-address", f"127.0.0.1:{free_port()}", "--fleet-peers", "job"),
        )
        training = stack.enter_context(node.user(ADA, TRAIN))
        assert (line(training), line(training)) == ("baseline", "made 1")
        _keep_capture(node)
        public = node.directory / "public"
        public.mkdir()
        public.chmod(0o1777)
        names = {
            **{"PORT": node.metrics_port, "PID": training.pid, "CAPTURE": CAPTURE, "BESIDE": BESIDE},
            **{
                "CAPTURES": str(node.captures),
                "PUBLIC": str(public),
                "SERVICE_PORT": service.getsockname()[1],
            },
            "SOCKET": str(node.socket),
        }
        users = {uid: stack.enter_context(node.user(uid, COMMANDS)) for uid in (ADA, BOB)}
        yield Place(node, training, users, names, notes={"service": service})


def _keep_capture(node: Shared) -> None:
    """Have a capture of Ada's where the daemon keeps it."""
    catalog = Catalog(node.captures)
    folder = catalog.create(CAPTURE)
    (folder / "rank0.json").write_bytes(TRACE)
    digest = hashlib.sha256(TRACE).hexdigest()
    trace = RankTrace(0, CaptureState.COMPLETE, "", "rank0.json", len(TRACE), digest, uid=ADA)
    catalog.save(
        CaptureRecord(
            capture_id=CAPTURE,
            run="baseline",
            trigger="command",
            requested_at=time.time(),
            state=CaptureState.COMPLETE,
            step_range=(1, 2),
            ranks=[trace],
        )
    )


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attack_is_refused_logged_and_harmless(place: Place, attack: Attack) -> None:
    before = len(place.node.log())
    result = place.ask(BOB, attack.tried)
    assert attack.outcome(result), result
    if attack.logged:
        words = attack.logged.format(BOB=BOB, pid=place.users[BOB].pid)
        eventually(lambda: words in place.node.log()[before:], 5, place.node.log)
    if attack.own:
        own = place.ask(ADA, attack.own)
        assert attack.allowed(own), own
    if attack.root is not None:
        attack.root(place)
    place.check_unharmed()


def test_there_are_at_least_26_attacks() -> None:
    assert len({attack.name for attack in ATTACKS}) >= 26
