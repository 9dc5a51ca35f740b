"""One line on a Slurm job that is over, as deploy/slurm/epilog.sh writes it into the job's record.

Every user of a cluster may read these records, so the line has the cause, the rank, the cost and the goodput
only: no path, no line of a script, no exception. Root, as which an epilog runs, reads the kept report with
the rights of the job's user and gives up all rights before it looks into it. The real user stays root until
then, so that no process of the user can trace or stop this one.
"""

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torchperfd.errors import TorchperfdError
from torchperfd.model.card import VerdictCard, card_of
from torchperfd.model.formatting import duration
from torchperfd.v1 import control_pb2
from torchperfd_cli.commands._daemon import connect
from torchperfd_cli.commands._options import open_runs
from torchperfd_cli.commands._run_overview import read_overview
from torchperfd_daemon.errors import NoSuchTargetError, UsageError
from torchperfd_daemon.goodput.totals import RunGoodput
from torchperfd_daemon.service import translate_diagnosis

_ANSWER_S: Final = 2.0
_NOBODY: Final = 65_534
_ROOT: Final = 0


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A Slurm job that had this node.

    Attributes:
        began: Unix seconds; reports that are older are not its own. 0 if unknown.
    """

    number: str
    uid: int
    began: float

    @classmethod
    def of_environment(cls, number: str, environ: Mapping[str, str]) -> "SlurmJob":
        """Return the job of an id. For root its user is Slurm's variable, for others they themselves.

        Raises:
            UsageError: The id or a variable is no number, or root has not said whose job it is.
        """
        uid = str(os.geteuid())
        if os.geteuid() == _ROOT:
            uid = environ.get("SLURM_JOB_UID", "")
        began = environ.get("SLURM_JOB_START_TIME") or "0"
        if not all(each.isascii() and each.isdecimal() for each in (number, uid, began)):
            raise UsageError(
                "--slurm-job takes the id of a job, and root's SLURM_JOB_UID is its user",
                "run it in an epilog, or as the job's user",
            )
        return cls(number, int(uid), float(began))

    def owns(self, run: control_pb2.Run) -> bool:
        """Return whether all ranks of a run are of this job and its user, who is known by the kernel."""
        return bool(run.ranks) and all(
            rank.identity.slurm_job_id == self.number and rank.HasField("uid") and rank.uid == self.uid
            for rank in run.ranks
        )


@dataclass(frozen=True, slots=True)
class _Found:
    """What is known of the newest run of a job.

    Attributes:
        world_size: Ranks of the run, on all nodes.
        goodput: Of its ranks that were on this node.
    """

    run: str
    world_size: int
    card: VerdictCard | None
    goodput: RunGoodput | None = None


def job_line(job: SlurmJob, socket: str | None) -> str:
    """Return the line on a job: the verdict on its newest run, and the goodput of its ranks on this node.

    The verdict is that of the run's kept report, else the daemon's, which remembers a run for a minute.

    Raises:
        NoSuchTargetError: The job has no run that is known here.
    """
    kept = _kept(job)
    asked = _asked(job, socket, kept.run if kept is not None else "")
    card = next((each.card for each in (kept, asked) if each is not None and each.card is not None), None)
    parts = [card.heading.replace(" · ", ", ")] if card is not None else []
    if asked is not None and asked.goodput is not None:
        ranks, world = len(asked.goodput.ranks), max(each.world_size for each in (kept, asked) if each)
        seen = f", {ranks} of {world} ranks" if ranks < world else ""
        parts.append(
            f"goodput {asked.goodput.ratio:.1%} of {duration(asked.goodput.total_seconds)} of rank time{seen}"
        )
    if not parts:
        raise NoSuchTargetError(
            f"no run of Slurm job {job.number} is known here", "`torchperfd runs` lists kept runs"
        )
    return "; ".join(parts)


def _kept(job: SlurmJob) -> _Found | None:
    report = _read_report(job)
    if report is None:
        return None
    with contextlib.suppress(TorchperfdError):
        overview = read_overview(report, f"the report of job {job.number}")
        return _Found(overview.record.run, overview.record.world_size, overview.card)
    return None


def _read_report(job: SlurmJob) -> bytes | None:
    """Return the newest report of a job; afterwards this process has no rights of root."""
    is_root = os.geteuid() == _ROOT
    if is_root:
        os.setgroups([])
        os.setegid(_NOBODY)
        os.seteuid(job.uid)
    try:
        # As train.sbatch, task_prolog.sh and the client itself name the run of a job.
        named = re.compile(rf"(?:slurm-)?{job.number}(?:\.\d+)?")
        with contextlib.suppress(TorchperfdError, OSError):
            store = open_runs(None)
            for each in store.list():
                if each.modified >= job.began and named.fullmatch(each.run_id):
                    return store.content(each.run_id)
        return None
    finally:
        if is_root:
            os.seteuid(_ROOT)
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def _asked(job: SlurmJob, socket: str | None, kept: str) -> _Found | None:
    """Return what the daemon knows of a job; None without a daemon, or if it knows nothing."""
    with contextlib.suppress(TorchperfdError), connect(socket, answer_seconds=_ANSWER_S) as daemon:
        listed = daemon.ListRuns(control_pb2.ListRunsRequest(), timeout=_ANSWER_S)
        run = max(filter(job.owns, listed.runs), key=_last_step, default=None)
        if run is None:
            # The daemon has forgotten the ranks. Another user's run may have had the name first.
            names = (f"{kept}@{job.uid}", kept) if kept else ()
            goodput = next((found for name in names if (found := _goodput(daemon, name))), None)
            return _Found(goodput.run, 0, None, goodput) if goodput is not None else None
        answer = daemon.Diagnose(control_pb2.DiagnoseRequest(run=run.run), timeout=_ANSWER_S)
        card = card_of(answer.verdicts[0]) if answer.verdicts else None
        return _Found(run.run, run.world_size, card, _goodput(daemon, run.run))
    return None


def _goodput(daemon: Any, run: str) -> RunGoodput | None:
    answer = daemon.GetGoodput(control_pb2.GetGoodputRequest(run=run), timeout=_ANSWER_S)
    return next(map(translate_diagnosis.run_goodput_from_message, answer.runs), None)


def _last_step(run: control_pb2.Run) -> float:
    return max(rank.last_step_unix_seconds for rank in run.ranks)
