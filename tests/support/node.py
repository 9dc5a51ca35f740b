"""A real node for tests: a real daemon process, its directories, and commands against it."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import psutil

Outcome = TypeVar("Outcome")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "client" / "examples" / "train_digits.py"
TRAIN = Path(__file__).with_name("train.py")
# The size of a terminal is in the environment of pytest's workers, and outranks the size of a test's own.
_FOREIGN = re.compile("TORCHPERFD_|(COLUMNS|LINES)$")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.05


class Node:
    """Directories and environment of one node, and at most one daemon on it."""

    def __init__(self) -> None:
        # Short: a unix socket's path has at most 107 bytes, and pytest's own are longer.
        self.directory = Path(tempfile.mkdtemp(prefix="tpd-"))
        self.socket = self.directory / "d.sock"
        self.captures = self.directory / "captures"
        self.daemon: subprocess.Popen[bytes] | None = None
        self.metrics_port = 0
        self.options: tuple[str, ...] = ()
        """The options of every daemon here, besides those of :meth:`start_daemon`."""
        self.program: tuple[str, ...] = ("-m", "torchperfd")
        """What Python runs as the daemon."""
        self.env = {
            **{name: value for name, value in os.environ.items() if not _FOREIGN.match(name)},
            "TORCHPERFD_SOCKET": str(self.socket),
            "TORCHPERFD_CAPTURES_DIR": str(self.captures),
            "XDG_RUNTIME_DIR": str(self.directory),
            "XDG_STATE_HOME": str(self.directory / "state"),
            "OMP_NUM_THREADS": "1",
            # What a run captures by itself depends on how long it lasts.
            "TORCHPERFD_NO_ADVISE": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def start_daemon(self, *options: str, wait: bool = True) -> "subprocess.Popen[bytes]":
        """Start ``torchperfd serve`` and wait until it is ready."""
        if not self.metrics_port:
            self.metrics_port = free_port()
        log = (self.directory / "daemon.log").open("ab")
        with log:
            self.daemon = subprocess.Popen(
                [
                    *(sys.executable, *self.program, "serve"),
                    *("--socket", str(self.socket), "--captures-dir", str(self.captures)),
                    *("--metrics-address", f"127.0.0.1:{self.metrics_port}"),
                    *(*self.options, *options),
                ],
                env=self.env,
                stdout=log,
                stderr=log,
            )
        if wait:
            eventually(lambda: self.get("/-/ready")[0] == 200, 20, self.log)
        return self.daemon

    def stop_daemon(self, number: int = signal.SIGTERM) -> int:
        """End the daemon with a signal; return its exit code."""
        assert self.daemon is not None
        self.daemon.send_signal(number)
        code = self.daemon.wait(15)
        self.daemon = None
        return code

    def log(self) -> str:
        """Return what the daemon has said."""
        path = self.directory / "daemon.log"
        return path.read_text() if path.exists() else ""

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Fetch from the daemon's HTTP side; (0, '') when nothing listens."""
        url = f"http://127.0.0.1:{self.metrics_port}{path}"
        request = urllib.request.Request(url, headers=dict(headers or {}))
        try:
            with urllib.request.urlopen(request, timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metric(self, series: str) -> float | None:
        """Return the value of the one series that starts so, None when there is none."""
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith(series):
                return float(line.rpartition(" ")[2])
        return None

    def command(self, *arguments: str, timeout: float = 120) -> "subprocess.CompletedProcess[str]":
        """Run ``torchperfd …`` to its end."""
        return subprocess.run(
            [sys.executable, "-m", "torchperfd", *arguments],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def json(self, *arguments: str) -> Any:
        """Run a read command with ``--json`` and return its document."""
        done = self.command(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    @contextlib.contextmanager
    def running(self, *command: str, **extra_env: str) -> Iterator["subprocess.Popen[str]"]:
        """Run a command in the background; it is killed if it outlives the block."""
        with subprocess.Popen(
            command,
            env={**self.env, **extra_env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()

    def train(
        self,
        *arguments: str,
        script: Path = TRAIN,
        ranks: int = 1,
        options: Sequence[str] = ("--quiet",),
        **extra_env: str,
    ) -> "contextlib.AbstractContextManager[subprocess.Popen[str]]":
        """Run a script under ``torchperfd run`` with options, in the background as :meth:`running` does."""
        launcher = torchrun(ranks) if ranks > 1 else (sys.executable,)
        command = (*launcher, "-m", "torchperfd", "run", *options, str(script), *arguments)
        return self.running(*command, **extra_env)

    def close(self) -> None:
        """End the daemon and whatever else still runs here, and remove the directories."""
        if self.daemon is not None and self.daemon.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.daemon.send_signal(signal.SIGCONT)
            self.stop_daemon(signal.SIGKILL)
        # A launcher that is killed leaves its ranks; one that spins takes a processor from all later tests.
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TORCHPERFD_SOCKET") == str(self.socket):
                    process.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


def free_port() -> int:
    """Return a TCP port without a listener right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def torchrun(ranks: int) -> tuple[str, ...]:
    """Return the beginning of a command that starts so many ranks on this machine."""
    return (
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
        *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
    )


def import_path() -> str:
    """Return the PYTHONPATH of processes that import the tests and the benchmarks."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def eventually(condition: Callable[[], object], seconds: float, explain: Callable[[], str] = str) -> None:
    """Wait for something that another process will make true.

    Raises:
        AssertionError: It did not become true in time.
    """
    deadline = time.monotonic() + seconds
    pause = _FIRST_PAUSE_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not true within {seconds} s; {explain()}")
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE_S)


@contextlib.contextmanager
def new_node() -> Iterator[Node]:
    """A node without a daemon; start one with ``node.start_daemon()``."""
    node = Node()
    # It would load the processors while the next test runs; who tests it says so.
    node.options = ("--no-analyze-captures",)
    try:
        yield node
    finally:
        node.close()


def side_by_side(
    scenarios: Mapping[str, Callable[[], Outcome]], abreast: int = 3
) -> "dict[str, Future[Outcome]]":
    """Play scenarios, some at a time since each mostly waits; return how each came out once all have ended.

    They begin in the order given. A future raises what its scenario raised, so that only the test that asks
    for it fails.
    """
    with ThreadPoolExecutor(abreast) as pool:
        return {name: pool.submit(scenario) for name, scenario in scenarios.items()}
