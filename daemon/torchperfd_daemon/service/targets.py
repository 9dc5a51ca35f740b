"""Targets: resolves a request to connected ranks of a run."""

from collections.abc import Callable, Iterable

from torchperfd_daemon.errors import NoSuchTargetError
from torchperfd_daemon.service.permissions import Rights
from torchperfd_daemon.service.process import check_real
from torchperfd_daemon.service.rank_session import Session
from torchperfd_daemon.store import Store

OfRun = Callable[[str], list[Session]]


class Targets:
    """Finds connected ranks.

    Args:
        of_run: Returns the connected ranks of a run, by rank.
        rights: Of the caller; runs that it may not command are found by their name only, and refused.
    """

    def __init__(self, store: Store, of_run: OfRun, rights: Rights) -> None:
        self._store = store
        self._of_run = of_run
        self._rights = rights

    def runs(self, job: str = "") -> list[str]:
        """Return the caller's runs, of all jobs or of one, that have a connected rank."""
        return [
            run
            for run, ranks in self._store.runs().items()
            if job in ("", ranks[0].identity.job_name)
            and self._rights.may_command(ranks[0].process.uid)
            and self._of_run(run)
        ]

    def run(self, name: str, job: str = "") -> str:
        """Return the run of a name, or the only one there is, of all jobs or of one, when it is empty.

        Raises:
            NoSuchTargetError: There is none, or several.
        """
        if name:
            name = self._rights.own_name(name, self._store.runs())
            if job and name not in self.runs(job):
                raise NoSuchTargetError(
                    f"this node has no run {name[:80]} of job {job[:80]}",
                    "`torchperfd ps` lists those there are",
                )
            return name
        runs = self.runs(job)
        if not runs:
            check_real(rank for rank in self._store.ranks() if job in ("", rank.identity.job_name))
        if len(runs) == 1:
            return runs[0]
        of_job = f" of job {job[:80]}" if job else ""
        if runs:
            raise NoSuchTargetError(
                f"this node has {len(runs)} runs{of_job}: {', '.join(runs)}", "choose one with --run"
            )
        if job:
            raise NoSuchTargetError(f"this node has no run{of_job}", "`torchperfd ps` lists those there are")
        raise NoSuchTargetError("this node has no run", "start one with `torchperfd run`")

    def ranks(self, run: str, chosen: Iterable[int]) -> list[Session]:
        """Return the chosen ranks of a run, all of them when none is chosen.

        Raises:
            NoSuchTargetError: There is no such run, or it lacks one of the ranks.
        """
        sessions = self._of_run(run)
        if not sessions:
            check_real(self._store.runs().get(run, ()))
            raise NoSuchTargetError(f"no run {run} on this node", "`torchperfd ps` lists those there are")
        self._rights.check(f"run {run}", (session.record.process.uid for session in sessions))
        wanted = set(chosen)
        there = {session.rank for session in sessions}
        if missing := sorted(wanted - there):
            raise NoSuchTargetError(
                f"run {run} has no rank {', '.join(map(str, missing))} on this node",
                f"it has {', '.join(map(str, sorted(there)))}",
            )
        return [session for session in sessions if session.rank in wanted or not wanted]
