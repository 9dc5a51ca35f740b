"""A node whose daemon several users share, and processes of these users."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from tests.as_user import USERS
from tests.support.node import Node

ADA, BOB = USERS

TRAIN = """
rank = Rank(SOCKET, "baseline")
welcome = rank.receive().welcome
print(welcome.run, flush=True)
made = 0
def report():
    global made
    made += 1
    kind = session_pb2.KindAccount(kind=1, steps=made, step_ns=made * 10**9)
    rank.say(account=session_pb2.Account(kinds=[kind], recorded_steps=made))
    print("made", made, flush=True)
report()
for line in sys.stdin:
    word = line.strip()
    if word == "step":
        report()
    elif word == "receive":
        print(rank.receive().WhichOneof("body"), flush=True)
    elif word == "leave":
        rank.leave()
        print("left", flush=True)
"""
"""The code of a rank, for :meth:`Shared.user`: it makes a step for each line ``step`` that it reads."""

COMMANDS = """
import json
for line in sys.stdin:
    found = {**globals()}
    try:
        exec(json.loads(line), found)
    except Exception as error:
        found["result"] = f"{type(error).__name__}: {error}"
    print(json.dumps(found["result"]), flush=True)
"""
"""The code of a process that runs code of its input, one document a line, and prints its ``result``."""


class Shared(Node):
    """A node whose daemon all users share."""

    def __init__(self) -> None:
        super().__init__()
        self.directory.chmod(0o755)
        self._files = itertools.count()

    def start_shared(self, *options: str) -> None:
        """Start the daemon with a socket that everybody may open."""
        self.start_daemon("--socket-mode", "666", *options)

    @contextlib.contextmanager
    def user(self, uid: int, code: str) -> Iterator["subprocess.Popen[str]"]:
        """Run code as a user."""
        path = self.directory / f"code{next(self._files)}.py"
        path.write_text(f"SOCKET = {str(self.socket)!r}\n{code}")
        arguments = (sys.executable, "-m", "tests.as_user", str(uid), str(path))
        with subprocess.Popen(
            arguments,
            env={**self.env, "PYTHONPATH": os.pathsep.join(sys.path), "GRPC_ENABLE_FORK_SUPPORT": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()

    def as_user(self, uid: int, code: str) -> Any:
        """Run code as a user to its end; return the document that it prints."""
        with self.user(uid, code) as process:
            printed, _ = process.communicate(timeout=120)
        assert process.returncode == 0, printed
        return json.loads(printed)

    def runs(self) -> dict[str, list[tuple[int, bool, int]]]:
        """Return rank, whether it is connected, and steps, of each run, as root sees them."""
        return {
            run["run"]: [(rank["rank"], rank["connected"], rank["steps"]) for rank in run["ranks"]]
            for run in self.json("ps")["runs"]
        }


def line(process: "subprocess.Popen[str]", word: str = "") -> str:
    """Say a word to a user's process, if one is given, and return its next line."""
    assert process.stdin is not None
    assert process.stdout is not None
    if word:
        process.stdin.write(f"{word}\n")
        process.stdin.flush()
    return process.stdout.readline().strip()


def asked(process: "subprocess.Popen[str]", code: str) -> Any:
    """Have a process of :data:`COMMANDS` run code; return the ``result`` that it leaves."""
    return json.loads(line(process, json.dumps(code)))
