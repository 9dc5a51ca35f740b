"""Two users without privileges, and root, on one node: what one of them plants harms no other.

The users are numbers that have no entry anywhere. Their processes keep the right to read everything, so that
the interpreter may lie in a home of root's, and nothing else.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.node import eventually

from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.manifest import CaptureState

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users"),
    pytest.mark.needs("setpriv"),
]

PRECIOUS = "precious\n"

# A daemon of the attacker's: it accepts every client, and orders a capture into a directory of its choice.
FALSE_DAEMON = """
import sys, time
from concurrent import futures
import grpc
from torchperfd.v1 import session_pb2, session_pb2_grpc

socket, results, notes = sys.argv[1:]

class Session(session_pb2_grpc.SessionServicer):
    def Attach(self, requests, context):
        open(notes, "a").write(str(next(requests)))
        yield session_pb2.DaemonMessage(welcome=session_pb2.Welcome(captures_dir=results))
        yield session_pb2.DaemonMessage(prepare_capture=session_pb2.PrepareCapture(
            capture_id="../results", directory=results, options=session_pb2.CaptureOptions(steps=1)))
        yield session_pb2.DaemonMessage(commit_capture=session_pb2.CommitCapture(
            capture_id="../results", start_step=100, steps=1))
        time.sleep(60)

server = grpc.server(futures.ThreadPoolExecutor(4))
session_pb2_grpc.add_SessionServicer_to_server(Session(), server)
server.add_insecure_port("unix:" + socket)
server.start()
import os
os.chmod(socket, 0o777)
print("up", flush=True)
time.sleep(300)
"""

TRAIN = """
import sys, time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
began = time.monotonic()
while time.monotonic() < began + float(sys.argv[1]):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
print("trained")
"""


class Users:
    """Alice, who trains, and Mallory; a home of Alice's that only she may enter."""

    def __init__(self, directory: Path, alice: int, mallory: int) -> None:
        self.directory = directory
        self.alice = alice
        self.mallory = mallory
        self.runtime = Path(f"/tmp/torchperfd-{alice}")
        self.home = directory / "home"
        self.train = directory / "train.py"
        self.train.write_text(TRAIN)
        self.false_daemon = directory / "false_daemon.py"
        self.false_daemon.write_text(FALSE_DAEMON)
        for path, owner in ((self.home, alice), (directory / "mallory", mallory)):
            path.mkdir(mode=0o700)
            os.chown(path, owner, owner)
        self.env = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("TORCHPERFD_", "XDG_"))
            },
            "HOME": str(self.home),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def command(self, uid: int, *arguments: str) -> list[str]:
        """Return a command line that runs as a user."""
        if uid == 0:
            return [sys.executable, *arguments]
        reads = ("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search")
        ids = ("--reuid", str(uid), "--regid", str(uid), "--clear-groups")
        return ["setpriv", *ids, *reads, sys.executable, *arguments]

    def run(self, uid: int, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
        """Run Python as a user, to its end."""
        return subprocess.run(
            self.command(uid, *arguments),
            env={**self.env, **env},
            cwd=self.home if uid else self.directory,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def precious(self, owner: int, name: str) -> Path:
        """Return a file of a user's that no other may touch."""
        path = self.home / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(PRECIOUS)
        path.chmod(0o600)
        for each in (path, path.parent):
            os.chown(each, owner, owner)
        return path

    def plant(self, directory: Path, links: dict[str, Path]) -> None:
        """Have Mallory make a directory with links in it, before anybody else does."""
        script = (
            "import os, sys\n"
            "directory, *pairs = sys.argv[1:]\n"
            "os.mkdir(directory)\nos.chmod(directory, 0o777)\n"
            "for name, target in zip(pairs[::2], pairs[1::2]): os.symlink(target, directory + '/' + name)\n"
        )
        pairs = [part for name, target in links.items() for part in (name, str(target))]
        done = self.run(self.mallory, "-c", script, str(directory), *pairs)
        assert done.returncode == 0, done.stderr

    @contextlib.contextmanager
    def false_daemon_at(self, socket: Path, results: Path) -> Iterator[Path]:
        """Have Mallory's daemon listen; yields where it notes who talks to it."""
        notes = self.directory / "mallory" / "notes"
        command = self.command(self.mallory, str(self.false_daemon), str(socket), str(results), str(notes))
        with subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"up\n"
                yield notes
            finally:
                process.kill()


@pytest.fixture
def users() -> Iterator[Users]:
    """User ids that are unused on this machine."""
    directory = Path(tempfile.mkdtemp(prefix="tpd-"))
    directory.chmod(0o755)
    alice = 1_000_000_000 + secrets.randbelow(500_000_000)
    users = Users(directory, alice, alice + 500_000_000)
    yield users
    shutil.rmtree(directory)
    for path in (users.runtime, Path(f"/tmp/torchperfd-{users.mallory}")):
        if path.is_symlink():
            path.unlink()
        shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("victim", ["alice", "root"])
def test_run_with_a_planted_log_appends_to_no_other_file(users: Users, victim: str) -> None:
    uid, env = users.alice, {}
    runtime = users.runtime
    if victim == "root":
        # As `sudo -E` leaves it.
        session = users.directory / "mallory" / "xdg"
        users.plant(session, {})
        uid, runtime, env = 0, session / "torchperfd", {"XDG_RUNTIME_DIR": str(session)}
    target = users.precious(uid, "bashrc")
    users.plant(runtime, {"embedded.log": target, "daemon.sock.lock": target.with_name("created")})
    done = users.run(uid, "-m", "torchperfd", "run", str(users.train), "1", **env)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert target.read_text() == PRECIOUS
    assert [path.name for path in target.parent.iterdir()].count("created") == 0
    (line,) = [line for line in done.stderr.splitlines() if "cannot start a daemon" in line]
    assert f"user {users.mallory}" in line
    assert "XDG_RUNTIME_DIR" in line
    served = users.run(uid, "-m", "torchperfd", "serve", "--metrics-address", "127.0.0.1:0", **env)
    assert served.returncode == 1
    assert "XDG_RUNTIME_DIR" in served.stderr
    assert target.read_text() == PRECIOUS


@pytest.mark.parametrize("way", ["default", "named", "link", "open"])
def test_false_daemon_is_not_obeyed(users: Users, way: str) -> None:
    results = users.precious(users.alice, "results/rank0.json").parent
    env = {}
    runtime = users.runtime
    if way == "link":
        users.plant(users.directory / "mallory" / "trap", {})
        runtime.symlink_to(users.directory / "mallory" / "trap")
        os.chown(runtime, users.mallory, users.mallory, follow_symlinks=False)
    elif way == "open":
        # Alice's own, which she has left open to all.
        runtime.mkdir()
        runtime.chmod(0o777)
        os.chown(runtime, users.alice, users.alice)
    else:
        users.plant(runtime, {})
    socket = runtime / "daemon.sock"
    if way == "named":
        env["TORCHPERFD_SOCKET"] = str(socket)
    with users.false_daemon_at(socket, results) as notes:
        attach = "import torchperfd; torchperfd.attach();"
        done = users.run(users.alice, "-c", attach + TRAIN, "4", **env)
        listed = users.run(users.alice, "-m", "torchperfd", "ps", **env)
        as_root = users.run(0, "-m", "torchperfd", "ps", "--socket", str(socket))
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert done.stderr.count(f"not connected to the socket {socket}: ") == 1
    for command in (listed, as_root):
        assert command.returncode == 4
        assert "Traceback" not in command.stderr
    assert not notes.exists(), "not a word of Alice's reached it"
    assert {path.name: path.read_text() for path in results.iterdir()} == {"rank0.json": PRECIOUS}


def test_false_daemon_in_a_trusted_directory_is_not_obeyed(users: Users) -> None:
    """Only the kernel's word on who listens is left: the directory is root's, and open to all."""
    results = users.precious(users.alice, "results/rank0.json").parent
    shared = users.directory / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    socket = shared / "daemon.sock"
    with users.false_daemon_at(socket, results) as notes:
        attach = "import torchperfd; torchperfd.attach();"
        done = users.run(users.alice, "-c", attach + TRAIN, "4", TORCHPERFD_SOCKET=str(socket))
    assert f"user {users.mallory} listens at {socket}" in done.stderr
    assert f"TORCHPERFD_SERVICE_USER={users.mallory}" in done.stderr
    assert not notes.exists()
    assert {path.name: path.read_text() for path in results.iterdir()} == {"rank0.json": PRECIOUS}


def test_service_capture_of_root_writes_through_no_planted_link(users: Users) -> None:
    """A service of a user's own, Alice's rank and root's; Mallory plants links in their captures' folders."""
    service = users.mallory - 1
    captures = users.directory / "captures"
    captures.mkdir()
    captures.chmod(0o1777)
    os.chown(captures, service, service)
    runtime = users.directory / "run"
    runtime.mkdir()
    os.chown(runtime, service, service)
    socket = runtime / "d.sock"
    env = {"TORCHPERFD_SOCKET": str(socket), "TORCHPERFD_SERVICE_USER": str(service)}
    target = users.precious(0, "root/precious")
    serve = ("serve", "--socket", str(socket), "--socket-mode", "666", "--captures-dir", str(captures))
    quiet = ("--metrics-address", "127.0.0.1:0", "--no-analyze-captures")
    log = (users.directory / "daemon.log").open("wb")
    planter = (
        "import glob, os, sys, time\n"
        "while True:\n"
        "  for folder in glob.glob(sys.argv[1] + '/2*'):\n"
        "    for name in ('.rank0.json.part', '.rank0.json.json', 'rank0.json', 'rank0.manifest.json'):\n"
        "      try: os.symlink(sys.argv[2], folder + '/' + name)\n"
        "      except OSError: pass\n"
        "  time.sleep(0.001)\n"
    )
    run = ("-m", "torchperfd", "run", "--quiet", "--run", "roots", str(users.train), "120")

    def said() -> str:
        return (users.directory / "daemon.log").read_text()

    def seen() -> bool:
        return "roots" in users.run(0, "-m", "torchperfd", "ps", **env).stdout

    with log, contextlib.ExitStack() as processes:

        def start(uid: int, *arguments: str, **more: str) -> None:
            process = subprocess.Popen(
                users.command(uid, *arguments), env={**users.env, **more}, stdout=log, stderr=log
            )
            processes.callback(process.wait)
            processes.callback(process.terminate)

        start(service, "-m", "torchperfd", *serve, *quiet)
        eventually(socket.is_socket, 60, said)
        start(users.mallory, "-c", planter, str(captures), str(target))
        start(0, *run, **env)
        eventually(seen, 60, said)
        command = ("capture", "--run", "roots", "--steps", "2", "--timeout", "60")
        done = users.run(0, "-m", "torchperfd", *command, **env)
    assert target.read_text() == PRECIOUS
    assert "Traceback" not in done.stderr
    # Root may replace what lies in its way, so the capture is made all the same.
    assert done.returncode == 0, done.stderr
    (folder,) = captures.glob("2*")
    assert not (folder / "rank0.json").is_symlink()
    assert Catalog(captures).get(folder.name).state is CaptureState.COMPLETE


def test_daemon_of_a_service_is_obeyed_once_it_is_named(users: Users) -> None:
    service = users.mallory - 1
    runtime = users.directory / "run"
    runtime.mkdir()
    os.chown(runtime, service, service)
    socket = runtime / "d.sock"
    captures = users.directory / "captures"
    captures.mkdir()
    captures.chmod(0o1777)
    os.chown(captures, service, service)
    serve = ("serve", "--socket", str(socket), "--socket-mode", "666", "--captures-dir", str(captures))
    options = ("--metrics-address", "127.0.0.1:0", "--no-analyze-captures")
    script = (
        "import sys, time, torchperfd\n"
        "client = torchperfd.attach()\n"
        "deadline = time.monotonic() + float(sys.argv[1])\n"
        "while not client.connected and time.monotonic() < deadline: time.sleep(0.05)\n"
        "print(client.connected, client.parts.daemon_session.captures_dir)\n"
    )
    with subprocess.Popen(
        users.command(service, "-m", "torchperfd", *serve, *options),
        env=users.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as daemon:
        try:
            eventually(socket.is_socket, 60)
            time.sleep(0.5)
            refused = users.run(users.alice, "-c", script, "3", TORCHPERFD_SOCKET=str(socket))
            named = users.run(
                users.alice,
                "-c",
                script,
                "60",
                TORCHPERFD_SOCKET=str(socket),
                TORCHPERFD_SERVICE_USER=str(service),
            )
        finally:
            daemon.terminate()
    assert refused.stdout.startswith("False "), refused.stderr
    # A service keeps captures to itself, and takes them over from there.
    assert named.stdout == f"True {users.home}/.local/state/torchperfd/captures\n", named.stderr
