"""Identity of this process: its run, its rank, and a key unlike that of any other process."""

import os
import platform
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from zlib import crc32

_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_KERNELS: Final = frozenset({"ipykernel_launcher.py", "colab_kernel_launcher.py"})
"""Scripts of processes in which a notebook runs; Jupyter has the notebook's own path in JPY_SESSION_NAME."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A training process. (run, rank) names it to people; node, pid, namespace and start make it unique.

    Attributes:
        script: The name of the script's file, or of its module for ``python -m``.
        command: The script or ``-m MODULE`` with its arguments, quoted for a shell; empty if unknown.
    """

    run: str
    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    job_name: str
    script: str
    slurm_job_id: str
    pod_uid: str
    node: str
    pid: int
    pid_namespace: int
    process_start_ticks: int
    python_version: str
    command: str = ""

    @property
    def key(self) -> str:
        """A name for this process that no other process has had."""
        return f"{self.node}-{self.pid_namespace}-{self.pid}-{self.process_start_ticks}"


@dataclass(frozen=True, slots=True)
class Launch:
    """How the script of this process was started.

    Attributes:
        stem: What its runs are named after: the file without its ending, or the whole name of the module.
    """

    script: str
    stem: str
    command: str


def read_launch(argv: Sequence[str], original: Sequence[str]) -> Launch:
    """Return how a script was started.

    The command line of the interpreter ends in the script's own, whichever launchers stand in between.

    Args:
        argv: As ``sys.argv`` has it: the script or its file, then its arguments.
        original: As ``sys.orig_argv`` has it.
    """
    script = Path(argv[0]).name if argv and argv[0] else "python"
    if script in _KERNELS:
        return Launch(script, Path(os.environ.get("JPY_SESSION_NAME") or "notebook").stem, "")
    arguments = [*argv[1:]]
    before = len(original) - len(arguments) - 1
    if before < 1 or [*original[before + 1 :]] != arguments:
        return Launch(script, Path(script).stem, "")
    target = original[before]
    if original[before - 1] == "-m":
        return Launch(target, target, shlex.join(["-m", target, *arguments]))
    if Path(target).name != script:
        return Launch(script, Path(script).stem, "")
    return Launch(script, Path(script).stem, shlex.join([target, *arguments]))


def read_identity(
    *,
    run: str | None = None,
    job_name: str | None = None,
    environ: Mapping[str, str] = os.environ,
    proc: Path = Path("/proc"),
) -> Identity:
    """Read the identity from arguments, then the launcher's environment, then the process itself.

    Args:
        run: Overrides the name from the launcher; stable across elastic restarts.
        job_name: What people call this kind of run; the script's name by default.
        environ: The environment; torchrun and Slurm variables are understood.
        proc: Root of procfs.
    """
    pid = os.getpid()
    namespace, start = _process_facts(proc)
    launch = read_launch(sys.argv, sys.orig_argv)
    node = environ.get("NODE_NAME") or socket.gethostname()
    slurm_job_id = environ.get("SLURM_JOB_ID", "")
    pod_uid = environ.get("POD_UID", "")
    elastic = environ.get("TORCHELASTIC_RUN_ID", "")
    if elastic == "none":
        # torchrun's default for a run without a name: the same for every run there is.
        elastic = ""
    # A pod's uid comes after the rendezvous: a job of several pods is one run.
    stem = launch.stem
    shared = elastic or slurm_job_id or _rendezvous_name(environ, stem, node) or pod_uid
    if _UUID.fullmatch(shared):
        # As torchrun makes on one node. Its digits are random, so the first eight are as good as all.
        shared = f"{stem}-{shared[:8].lower()}"
    generated = f"{stem}-{_short_id(node, _boot_id(proc), namespace, pid, start)}"
    return Identity(
        run=run or environ.get("TORCHPERFD_RUN") or shared or generated,
        rank=_rank(environ),
        world_size=_integer(environ, "WORLD_SIZE", "SLURM_NTASKS", default=1),
        local_rank=_integer(environ, "LOCAL_RANK", "SLURM_LOCALID"),
        node_rank=_integer(environ, "GROUP_RANK", "SLURM_NODEID"),
        job_name=job_name or environ.get("TORCHPERFD_JOB") or stem,
        script=launch.script,
        slurm_job_id=slurm_job_id,
        pod_uid=pod_uid,
        node=node,
        pid=pid,
        pid_namespace=namespace,
        process_start_ticks=start,
        python_version=platform.python_version(),
        command=launch.command,
    )


def _short_id(*parts: object) -> str:
    """Return eight hexadecimal digits that are the same for the same parts."""
    return f"{crc32(repr(parts).encode()):08x}"


def _rendezvous_name(environ: Mapping[str, str], stem: str, node: str) -> str:
    """Return a name that every rank of the job makes up alike; empty where they have nothing in common."""
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not port:
        return ""
    if environ.get("TORCHELASTIC_RUN_ID"):
        # On one node the launcher is the common parent; several have only the address where ranks meet.
        several_nodes = _integer(environ, "GROUP_WORLD_SIZE", default=1) > 1
        meeting = (address, port) if several_nodes else (node, os.getppid(), port)
        return f"{stem}-{_short_id(*meeting)}"
    is_loopback = address in ("", "localhost", "::1") or address.startswith("127.")
    if _integer(environ, "WORLD_SIZE", default=1) == 1 or is_loopback:
        return ""
    return f"{stem}-{_short_id(address, port)}"


def _rank(environ: Mapping[str, str]) -> int:
    if not environ.get("RANK") and not environ.get("SLURM_PROCID") and environ.get("NODE_RANK") == "0":
        # Lightning's own launcher numbers the ranks of its node only; on the first node they are the job's.
        return _integer(environ, "LOCAL_RANK")
    return _integer(environ, "RANK", "SLURM_PROCID")


def _integer(environ: Mapping[str, str], *names: str, default: int = 0) -> int:
    for name in names:
        text = environ.get(name, "")
        if text.isdigit():
            return int(text)
    return default


def _boot_id(proc: Path) -> str:
    try:
        return (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _process_facts(proc: Path) -> tuple[int, int]:
    """Return (inode of the pid namespace, start time in clock ticks since boot), 0 where unreadable."""
    try:
        namespace = (proc / "self/ns/pid").stat().st_ino
    except OSError:
        namespace = 0
    try:
        # The command's name, field 2, may hold spaces and parentheses: count from its end.
        fields = (proc / "self/stat").read_text().rpartition(")")[2].split()
        start = int(fields[19])
    except (OSError, IndexError, ValueError):
        start = 0
    return namespace, start
