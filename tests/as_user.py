"""Run Python code as another, unprivileged user: ``python -m tests.as_user UID CODE_FILE``.

All that the code needs is imported before, since the user may not be able to read this repository or
Python's own library. The code finds ``grpc``, the protocol's modules, ``Rank`` and ``command``.
"""

import contextlib
import ctypes
import encodings.idna
import hashlib
import io
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc

from torchperfd.captures.files import Handover, HandoverError
from torchperfd.v1 import contract, control_pb2, control_pb2_grpc, session_pb2, session_pb2_grpc
from torchperfd_cli import main as main_module
from torchperfd_daemon.collectors.procfs import parse_stat, read

_PR_SET_DUMPABLE = 4

USERS = (61_001, 61_002)
"""Ids that no account of a test machine has."""


class Rank:
    """A training process's end of a session, of this very process.

    Args:
        path: The daemon's socket.
        run: Name of its run.
        rank: Its rank.
        features: What its client can do.
        more: Further fields of the identity.
    """

    def __init__(
        self,
        path: str,
        run: str,
        rank: int = 0,
        features: tuple[str, ...] = contract.FEATURES,
        **more: Any,
    ) -> None:
        self.channel = grpc.insecure_channel(f"unix:{path}", options=[("grpc.use_local_subchannel_pool", 1)])
        self._outgoing: queue.Queue[Any] = queue.Queue()
        self.call: Any = session_pb2_grpc.SessionStub(self.channel).Attach(iter(self._outgoing.get, None))
        identity = {
            "run": run,
            "rank": rank,
            "world_size": 1,
            "node": "node",
            "pid": os.getpid(),
            "pid_namespace": os.stat("/proc/self/ns/pid").st_ino,
            "process_start_ticks": parse_stat(read("/proc/self/stat")).start_ticks,
            "script": f"/home/{os.getuid()}/secret.py",
            **more,
        }
        self.say(
            hello=session_pb2.Hello(
                api=session_pb2.ApiRange(min=contract.API_MIN, max=contract.API_MAX),
                features=features,
                identity=session_pb2.RankIdentity(**identity),
            )
        )

    def say(self, **body: Any) -> None:
        """Send a message."""
        self._outgoing.put(session_pb2.ClientMessage(**body))

    def receive(self) -> session_pb2.DaemonMessage:
        """Return the daemon's next message; raises what it refuses the session with."""
        message: session_pb2.DaemonMessage = next(self.call)
        return message

    def leave(self) -> None:
        """Say goodbye, and wait until the daemon has taken note."""
        self.say(goodbye=session_pb2.Goodbye(reason="done"))
        for _ in self.call:
            pass
        self.channel.close()


def command(*arguments: str) -> tuple[int, str]:
    """Run ``torchperfd …`` in this process; return its exit code and all that it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main_module.run_command([*arguments])
    return code, printed.getvalue()


def become(uid: int) -> None:
    """Give up all privileges."""
    for name in main_module.COMMANDS:
        main_module.command_module(name)
    # gRPC imports some of its parts with the first call; this one fails, and has them imported.
    with contextlib.suppress(grpc.RpcError), grpc.insecure_channel("unix:/nonexistent") as channel:
        control_pb2_grpc.ControlStub(channel).GetInfo(control_pb2.GetInfoRequest(), timeout=0.01)
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    # As any process that the user has started: its files in procfs are the user's.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)


def main() -> None:
    """Become the user, and run the code."""
    uid, file = int(sys.argv[1]), Path(sys.argv[2])
    code = compile(file.read_text(), file.name, "exec")
    known = {
        "Handover": Handover,
        "HandoverError": HandoverError,
        "Path": Path,
        "Rank": Rank,
        "command": command,
        "contract": contract,
        "control_pb2": control_pb2,
        "control_pb2_grpc": control_pb2_grpc,
        "ctypes": ctypes,
        "encodings": encodings,
        "grpc": grpc,
        "hashlib": hashlib,
        "itertools": itertools,
        "json": json,
        "os": os,
        "session_pb2": session_pb2,
        "signal": signal,
        "socket": socket,
        "subprocess": subprocess,
        "sys": sys,
        "time": time,
    }
    become(uid)
    exec(code, known)


if __name__ == "__main__":
    main()
