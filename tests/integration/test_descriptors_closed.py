"""A script that closes descriptors it did not open loses the daemon for a while, and not its life."""

import signal
import sys
from pathlib import Path

import pytest
from tests.support.node import Node

pytestmark = pytest.mark.slow

_BEGIN = """
import os, sys, time, torchperfd
client = torchperfd.attach()
deadline = time.monotonic() + 60
while not client.connected and time.monotonic() < deadline:
    time.sleep(0.02)
assert client.connected
"""

_CLOSES = {
    "range": "os.closerange(3, 4096)\n",
    "one_by_one": """
for descriptor in range(3, 256):
    try:
        os.close(descriptor)
    except OSError:
        pass
""",
    "duplicates": """
null = os.open(os.devnull, os.O_RDWR)
for descriptor in range(3, 256):
    try:
        os.fstat(descriptor)
    except OSError:
        continue
    if descriptor != null:
        os.dup2(null, descriptor)
""",
    "duplicates_in_native_code": """
import ctypes
null = os.open(os.devnull, os.O_RDWR)
for descriptor in map(int, os.listdir("/proc/self/fd")):
    if descriptor > 2 and descriptor != null:
        ctypes.CDLL(None).dup2(null, descriptor)
""",
    "daemonise": """
if os.fork():
    os._exit(0)
os.setsid()
os.closerange(3, 4096)
""",
}

_END = """
for _ in range(100):
    client.step()
    time.sleep(0.02)
print("alive", client.report().totals.train.steps >= 0)
"""


@pytest.mark.parametrize("how", sorted(_CLOSES))
def test_script_closing_all_descriptors_lives_on(node: Node, tmp_path: Path, how: str) -> None:
    node.start_daemon()
    script = tmp_path / "closes.py"
    script.write_text(_BEGIN + _CLOSES[how] + _END)
    with node.running(sys.executable, str(script)) as process:
        output, errors = process.communicate(timeout=90)
    assert (process.returncode, output, errors) == (0, "alive True\n", "")


_CONNECTS = """
import os, socket, sys, threading, time, torchperfd
listener = socket.socket(socket.AF_UNIX)
listener.bind(os.environ["TORCHPERFD_SOCKET"])
listener.listen(8)
client = torchperfd.attach()
time.sleep({seconds})
began = time.monotonic()
"""

_TOOK = """
assert time.monotonic() - began < 10, time.monotonic() - began
"""


@pytest.mark.parametrize("seconds", [0.0, 0.3, 4.0])
@pytest.mark.parametrize("how", ["range", "one_by_one"])
def test_script_closing_while_no_daemon_answers_lives_on(
    node: Node, tmp_path: Path, how: str, seconds: float
) -> None:
    """Something listens at the socket and accepts nothing: gRPC has descriptors, and no session."""
    script = tmp_path / "closes.py"
    script.write_text(_CONNECTS.format(seconds=seconds) + _CLOSES[how] + _TOOK + _END + "time.sleep(4)\n")
    with node.running(sys.executable, str(script)) as process:
        output, errors = process.communicate(timeout=90)
    assert (process.returncode, output, errors) == (0, "alive True\n", "")


_PIPES = """
from multiprocessing.connection import Pipe
began = time.monotonic()
for _ in range(20):
    ours, theirs = Pipe()
    theirs.close()
    try:
        ours.recv()
    except EOFError:
        pass
    ours.close()
print("closed", time.monotonic() - began < 1)
"""


def test_scripts_own_sockets_close_while_no_daemon_answers(node: Node, tmp_path: Path) -> None:
    """They are no descriptors of gRPC's: they are closed at once, and their other ends see it."""
    script = tmp_path / "pipes.py"
    script.write_text(_CONNECTS.format(seconds=0.5) + _PIPES)
    with node.running(sys.executable, str(script)) as process:
        output, errors = process.communicate(timeout=90)
    assert (process.returncode, output, errors) == (0, "closed True\n", "")


_FORKS = """
for _ in range(8):
    child = os.fork()
    if child == 0:
        again = torchperfd.attach()
        time.sleep(0.2)
        print(again.report().totals.train.steps, again.connected, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_attach_in_child_of_connected_process_lives(node: Node, tmp_path: Path) -> None:
    """gRPC cannot be used on both sides of a fork: the child is timed, and not connected."""
    node.start_daemon()
    script = tmp_path / "forks.py"
    script.write_text(_BEGIN + _FORKS)
    with node.running(sys.executable, str(script)) as process:
        output, errors = process.communicate(timeout=90)
    assert (process.returncode, output) == (0, "0 False\n" * 8)
    assert errors.count("was forked from one that was connected") == len(errors.splitlines()) == 8


_ATTACHES = """
import os, time, torchperfd
def count():
    return len(os.listdir("/proc/self/fd"))
before = count()
for _ in range(6):
    client = torchperfd.attach()
    deadline = time.monotonic() + 20
    while client.parts.stream.channel is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    client.detach()
deadline = time.monotonic() + 30
while count() > before and time.monotonic() < deadline:
    time.sleep(0.1)
print(count() - before)
"""


def test_detach_from_stopped_daemon_leaves_no_descriptor(node: Node, tmp_path: Path) -> None:
    daemon = node.start_daemon()
    script = tmp_path / "attaches.py"
    script.write_text(_ATTACHES)
    daemon.send_signal(signal.SIGSTOP)
    try:
        with node.running(sys.executable, str(script)) as process:
            output, errors = process.communicate(timeout=90)
    finally:
        daemon.send_signal(signal.SIGCONT)
    assert (process.returncode, output, errors) == (0, "0\n", "")


_FEW = """
import os, resource, socket, time, torchperfd
listener = socket.socket(socket.AF_UNIX)
listener.bind(os.environ["TORCHPERFD_SOCKET"])
listener.listen(8)
listener.setblocking(False)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 12, hard))
client = torchperfd.attach()
attempts = 0
deadline = time.monotonic() + 4
while time.monotonic() < deadline and not attempts:
    try:
        listener.accept()
        attempts += 1
    except OSError:
        time.sleep(0.05)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
listener.setblocking(True)
listener.settimeout(60)
listener.accept()
print("attempts", attempts)
"""


def test_script_short_of_descriptors_is_left_alone(node: Node, tmp_path: Path) -> None:
    """Connections wait until there are some again: each takes a descriptor."""
    script = tmp_path / "few.py"
    script.write_text(_FEW)
    with node.running(sys.executable, str(script)) as process:
        output, errors = process.communicate(timeout=120)
    assert (process.returncode, output, errors) == (0, "attempts 0\n", "")


_CHILDREN = """
import json, subprocess
print(json.dumps(sorted(set(os.environ) ^ BEFORE)))
child = "import json, os; print(json.dumps(dict(os.environ)))"
environment = json.loads(subprocess.run([sys.executable, "-c", child], capture_output=True).stdout)
print([name for name in environment if name in ("GRPC_ENABLE_FORK_SUPPORT", "GRPC_VERBOSITY")])
"""


def test_connected_script_and_children_have_their_environment(node: Node, tmp_path: Path) -> None:
    node.start_daemon()
    script = tmp_path / "children.py"
    script.write_text("import os\nBEFORE = set(os.environ)\n" + _BEGIN + _CHILDREN)
    with node.running(sys.executable, str(script)) as process:
        output, errors = process.communicate(timeout=90)
    assert (process.returncode, output, errors) == (0, "[]\n[]\n", "")
