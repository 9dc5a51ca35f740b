"""Workers that are forks of one process: it imports torch once for all of them.

    python -m benchmarks.advice.forks SOCKET

Reads requests from the socket of this number: each has the arguments of a worker, as JSON, and with them the
descriptors of its stdin and its stdout. Ends when the socket is closed.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import IO, Final

from benchmarks.advice import worker
from benchmarks.advice.loops import ENVIRONMENT, Start, Worker

_LONGEST_REQUEST: Final = 4096


@contextlib.contextmanager
def forks() -> Iterator[Start]:
    """Keep the process that is forked; what starts a worker does as ``loops.start_process``.

    The process ends with the context, and its forks end with their loops.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.advice.forks", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | ENVIRONMENT,
        )

    def start(arguments: Sequence[str]) -> Worker:
        its_stdin, requests = os.pipe()
        answers, its_stdout = os.pipe()
        try:
            socket.send_fds(ours, [json.dumps([*arguments]).encode()], [its_stdin, its_stdout])
        finally:
            os.close(its_stdin)
            os.close(its_stdout)
        return _Fork(requests, answers)

    try:
        yield start
    finally:
        ours.close()
        process.wait()


class _Fork:
    """One worker: it has ended when its stdout has."""

    def __init__(self, requests: int, answers: int) -> None:
        self.stdin: IO[str] | None = os.fdopen(requests, "w")
        self.stdout: IO[str] | None = os.fdopen(answers)

    def wait(self) -> int:
        """Wait for its end, once its stdin is closed."""
        if self.stdout:
            self.stdout.read()
        return 0


def main() -> int:
    """Fork a worker for each request; in a worker, return its exit code."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    # The first optimizer of a process imports it, which takes as long as torch itself.
    importlib.import_module("torch._dynamo")
    # No fork is waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, _LONGEST_REQUEST, 2)
        if not message:
            return 0
        if not os.fork():
            break
        for descriptor in descriptors:
            os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    requests.close()
    for descriptor, standard in zip(descriptors, (0, 1), strict=True):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for as long as the process lives
    sys.argv[1:] = json.loads(message)
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
