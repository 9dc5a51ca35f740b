"""A client that becomes a set-user-ID program: its user sees no more of it than the kernel allows."""

import asyncio
import contextlib
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.as_user import USERS
from tests.support.node import eventually
from tests.support.shared_node import Shared, line
from tests.unit.daemon.processes import HERE, start_ticks

from torchperfd_daemon.collectors.process import RankProcess
from torchperfd_daemon.service.rank_process import ChangedUsersError
from torchperfd_daemon.service.stuck_rank_stacks import read_stacks_by_py_spy, request_stacks_by_signal

ADA = USERS[0]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user"),
    pytest.mark.needs("gcc"),
]

PROGRAM = r"""
#include <unistd.h>
int main(int count, char **words) {
    if (setresgid(0, 0, 0) || setresuid(0, 0, 0)) return 1;
    execl(words[1], "python", "-c", words[2], (char *)0);
    return 2;
}
"""

ROOTS = """
import time
def handle_password_of_root():
    print("up", flush=True)
    time.sleep(600)
handle_password_of_root()
"""

CLIENT = """
rank = Rank(SOCKET, "suid")
rank.receive()
rank.say(stack_report=session_pb2.StackReport())
print(os.getpid(), flush=True)
sys.stdin.readline()
for name in os.listdir("/proc/self/fd"):
    try:
        os.set_inheritable(int(name), True)
    except OSError:
        pass
os.execv(PROGRAM, ["suid", PYTHON, ROOTS])
"""


@pytest.fixture
def node() -> Iterator[Shared]:
    with contextlib.closing(Shared()) as made:
        yield made


@pytest.fixture
def program(node: Shared) -> Path:
    return build_program(node.directory)


def build_program(directory: Path) -> Path:
    """Build a program that runs Python code as root for each user who starts it."""
    source, built = directory / "suid.c", directory / "suid"
    source.write_text(PROGRAM)
    subprocess.run(["gcc", "-o", str(built), str(source)], check=True)
    built.chmod(0o755 | stat.S_ISUID | stat.S_ISGID)
    return built


def test_set_user_id_program_is_not_read(node: Shared, program: Path) -> None:
    node.start_shared()
    constants = f"PROGRAM, PYTHON, ROOTS = {str(program)!r}, {sys.executable!r}, {ROOTS!r}\n"
    with node.user(ADA, constants + CLIENT) as client:
        pid = int(line(client))
        assert node.runs()["suid"][0][1]
        before = RankProcess("suid", 0, pid, HERE, start_ticks(pid), uid=ADA, gid=ADA)
        assert line(client, "exec") == "up"
        assert start_ticks(pid) == before.start_ticks
        # Whether the session still lasts or not, and whichever way is tried.
        with pytest.raises(ChangedUsersError):
            asyncio.run(read_stacks_by_py_spy(before, 10))
        with pytest.raises(ChangedUsersError):
            asyncio.run(request_stacks_by_signal(before, 1))
        seen = [node.as_user(ADA, STACKS) for _ in range(3)]
        eventually(lambda: not node.runs()["suid"][0][1], 20, node.log)
        seen.append(node.as_user(ADA, STACKS))
        assert "password_of_root" not in "".join(seen)
        ended = f"rank 0 of run suid, uid {ADA} (pid {pid}): the process has changed users"
        assert node.log().count(ended) == 1
        client.kill()


STACKS = """
import json
print(json.dumps(command("stacks", "--run", "suid", "--timeout", "3", "--signal")[1]))
"""
