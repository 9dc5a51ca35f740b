"""One job under torchperfd: a daemon of its own, ranks under torchrun, and the daemon's answers."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Final

import grpc
import psutil
from benchmarks.faults import journal
from benchmarks.faults.catalog import HANG, PERIOD_STEPS, WITH_NVML, Plan
from benchmarks.faults.gpus import Gpus
from benchmarks.faults.injection import END_FILE
from benchmarks.faults.journal import Measured, Step
from benchmarks.faults.neighbours import Neighbours
from benchmarks.faults.quota import Quota
from tests.support.node import Node, eventually, free_port, import_path

from torchperfd.v1 import control_pb2, control_pb2_grpc
from torchperfd_daemon.service import translate_diagnosis
from torchperfd_daemon.stacks.merge import merge

START_SECONDS: Final = 120.0
"""By then a job must be past its onset, on a machine however busy."""
WATCH_SECONDS: Final = 13.0
WATCH_HANG_SECONDS: Final = 20.0
WATCH_EARLY_SECONDS: Final = 25.0
"""Of faults that are there from the start, or nearly so: all evidence comes after their onset."""
WATCH_CONTROL_SECONDS: Final = 14.0
"""No run is called healthy before a window of samples is full."""
QUICK_WATCH_SECONDS: Final = 8.0
POLL_SECONDS: Final = 0.5
HEALED_STEPS: Final = 100
"""So many are measured after a fault has ended, if they come in time."""
HEALED_SECONDS: Final = 40.0

_RUN: Final = "faults"
JOB: Final = Path(__file__).with_name("job.py")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer at one moment.

    Attributes:
        after_onset: When, in seconds since the fault began; negative before.
        cause: Value of the cause.
        rank: None when all ranks alike are meant.
        cost: Seconds per step; None where the answer has none.
        evidence: In words.
    """

    after_onset: float
    cause: str
    rank: int | None
    cost: float | None
    evidence: str


@dataclass(frozen=True, slots=True)
class Standstill:
    """The ranks' stacks at the end, as ``torchperfd stacks`` shows them."""

    odd: tuple[int, ...]
    lines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction of ``torchperfd whatif`` at the end: the step without one cause.

    Attributes:
        removed: The value of a ``Removed``.
        rank: Whose excess; None where it is taken out of all ranks.
        phase: Which phase; empty where there is none.
        step_seconds: As predicted.
    """

    removed: str
    rank: int | None
    phase: str
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Trial:
    """One job, and the answers about it.

    Attributes:
        answers: In order of time; empty when no daemon answered.
        standstill: Of a job that hangs; else None.
        failure: Why the job is not scored; empty when it ran.
        predictions: Of the steps with the fault; empty where none were asked for.
        others: The share of the processors' time that others took (:meth:`Neighbours.share`).
    """

    plan: Plan
    measured: Measured
    answers: tuple[Answer, ...]
    standstill: Standstill | None = None
    failure: str = ""
    predictions: tuple[Prediction, ...] = ()
    others: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "plan": self.plan.to_dict()}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> "Trial":
        stands = document["standstill"]
        return cls(
            plan=Plan.from_dict(document["plan"]),
            measured=Measured(**document["measured"]),
            answers=tuple(Answer(**answer) for answer in document["answers"]),
            standstill=Standstill(tuple(stands["odd"]), tuple(stands["lines"])) if stands else None,
            failure=document["failure"],
            predictions=tuple(Prediction(**each) for each in document.get("predictions", ())),
            others=document.get("others", 0.0),
        )


Keep = Callable[[Trial, float, tuple[float, float], Path], object]
"""Takes a trial, its onset in Unix seconds, the load at its start and end, and the file of its samples."""


def run(plan: Plan, watch_seconds: float, *, heal: bool, keep: Keep | None = None) -> Trial:
    """Run a job until some time after its onset; its processes and its daemon are gone afterwards.

    Args:
        plan: The job.
        watch_seconds: How long it has its fault, and the daemon is asked.
        heal: Whether the fault is ended then, and the job measured without it once more.
        keep: Keeps a recording of what diagnosis was given; None: none is made.
    """
    node = Node()
    neighbours = Neighbours()
    load = os.getloadavg()[0]
    samples = node.directory / "samples.jsonl"
    if keep:
        node.program = ("-m", "benchmarks.faults.recorder", str(samples))
        node.env["PYTHONPATH"] = import_path()
    try:
        gpus = Gpus(node.directory, plan.ranks, plan.pace_seconds) if plan.fault in WITH_NVML else None
        if gpus:
            node.env.update(gpus.env)
        node.start_daemon(wait=False)
        eventually(lambda: node.get("/-/ready")[0] == 200, START_SECONDS, node.log)
        with (
            busy(plan.hogs),
            running(plan, node) as job,
            grpc.insecure_channel(f"unix:{node.socket}") as channel,
        ):
            control = control_pb2_grpc.ControlStub(channel)
            trial = _watch(plan, node, job, control, watch_seconds, heal=heal, gpus=gpus)
            trial = replace(trial, others=neighbours.share())
            onset = journal.onset_unix(journals(plan, node), plan.onset)
            if keep and samples.exists() and onset is not None:
                keep(trial, onset, (load, os.getloadavg()[0]), samples)
            return trial
    finally:
        node.close()


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep so many processes busy, which are no part of the job."""
    loop = [sys.executable, "-I", "-S", "-c", f"import os\nwhile os.getppid() == {os.getpid()}: pass"]
    hogs = [subprocess.Popen(loop) for _ in range(processes)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


@contextlib.contextmanager
def running(plan: Plan, node: Node) -> "Iterator[subprocess.Popen[bytes]]":
    """Run the ranks; end all of them afterwards, the stopped ones, too."""
    path = node.directory / "plan.json"
    path.write_text(json.dumps(plan.to_dict()))
    with (node.directory / "job.log").open("wb") as log:
        job = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(plan.ranks)),
                *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
                *("-m", "torchperfd", "run", str(JOB), str(path), str(node.directory)),
            ],
            env={**node.env, **plan.env, "TORCHPERFD_RUN": _RUN, "PYTHONPATH": import_path()},
            stdout=log,
            stderr=log,
        )
    try:
        yield job
    finally:
        ranks = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
        for process in ranks:
            with contextlib.suppress(psutil.Error):
                process.kill()
        job.kill()
        job.wait()
        psutil.wait_procs(ranks, timeout=10)
        for process in ranks:
            with contextlib.suppress(OSError):
                Quota(f"torchperfd-faults-{process.pid}").remove()


def _watch(
    plan: Plan,
    node: Node,
    job: "subprocess.Popen[bytes]",
    control: control_pb2_grpc.ControlStub,
    seconds: float,
    *,
    heal: bool,
    gpus: Gpus | None,
) -> Trial:
    """Ask for the verdict until the time is up, and measure what follows the fault."""
    said: list[tuple[float, Answer]] = []
    onset: float | None = None
    latest = time.time() + START_SECONDS
    while time.time() < (latest if onset is None else onset + seconds):
        if job.poll() is not None:
            break
        with contextlib.suppress(grpc.RpcError):
            said.append((time.time(), ask(control)))
        ranks = journals(plan, node)
        if gpus:
            with contextlib.suppress(grpc.RpcError):
                gpus.follow(_processes(control), ranks)
        onset = onset or journal.onset_unix(ranks, plan.onset)
        time.sleep(POLL_SECONDS)
    struck = onset is not None and job.poll() is None
    predictions = _predictions(node) if struck and plan.cause != HANG else ()
    stands = _stands(control) if struck and plan.cause == HANG else None
    end = _healed(plan, node, job) if struck and heal else None
    failure = ""
    if onset is None or job.poll() is not None:
        lines = (node.directory / "job.log").read_text(errors="replace").strip().splitlines()
        errors = [line for line in lines if "Error" in line] or lines[-1:]
        failure = f"the job ended with {job.poll()}: {errors[0] if errors else 'no error output'}"
    return Trial(
        plan=plan,
        measured=journal.measure(journals(plan, node), plan.onset, PERIOD_STEPS, end, grows=plan.grows),
        answers=tuple(replace(answer, after_onset=at - (onset or latest)) for at, answer in said),
        standstill=stands,
        failure=failure,
        predictions=predictions,
    )


def _healed(plan: Plan, node: Node, job: "subprocess.Popen[bytes]") -> float:
    """End a job's fault and wait for steps without it; return when it ended, Unix time."""
    end = time.time()
    (node.directory / END_FILE).touch()
    while time.time() < end + HEALED_SECONDS and job.poll() is None:
        ranks = journals(plan, node)
        first = journal.first_after(ranks, end)
        if first is not None and journal.last_step(ranks) >= first + journal.SETTLED + HEALED_STEPS:
            break
        time.sleep(POLL_SECONDS)
    return end


def journals(plan: Plan, node: Node) -> dict[int, list[Step]]:
    """Return what each rank has written of its steps so far."""
    return {rank: journal.read(node.directory / f"rank{rank}.log") for rank in range(plan.ranks)}


def ask(control: control_pb2_grpc.ControlStub) -> Answer:
    """Ask for the verdict, as of a moment that the caller knows."""
    verdict = control.GetRun(control_pb2.GetRunRequest(run=_RUN), timeout=5).verdict
    return Answer(
        after_onset=0.0,
        cause=verdict.cause,
        rank=verdict.rank if verdict.rank >= 0 else None,
        cost=verdict.cost_seconds_per_step,
        evidence=verdict.evidence,
    )


def _processes(control: control_pb2_grpc.ControlStub) -> dict[int, int]:
    known = control.GetRun(control_pb2.GetRunRequest(run=_RUN), timeout=5).ranks
    return {each.identity.rank: each.identity.pid for each in known}


def _predictions(node: Node) -> tuple[Prediction, ...]:
    return tuple(
        Prediction(each["removed"], each["rank"], each["phase"] or "", each["step_seconds"])
        for run in node.json("whatif")["runs"]
        for each in run["answers"]
    )


def _stands(control: control_pb2_grpc.ControlStub) -> Standstill:
    """Ask where every rank stands."""
    request = control_pb2.StacksRequest(run=_RUN, timeout_seconds=5)
    try:
        merged = merge(
            [
                translate_diagnosis.rank_stacks_from_message(message)
                for message in control.Stacks(request, timeout=20)
            ]
        )
    except grpc.RpcError:
        return Standstill((), ())
    lines = {
        group.activity.place.line
        for group in merged.groups
        if set(group.ranks) & set(merged.odd) and PurePath(group.activity.place.file).name == JOB.name
    }
    return Standstill(merged.odd, tuple(sorted(lines)))
