"""Which runs and captures a command means: its options, names by any unique prefix, and its requests.

Near misses of a name get a suggestion; daemons that did not answer are named.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import click

from torchperfd.model.formatting import did_you_mean
from torchperfd.v1 import control_pb2
from torchperfd_cli.commands._options import complete_jobs, complete_runs, fleet_option
from torchperfd_cli.commands._series import NO_SERIES, SeriesOptions, series_options
from torchperfd_daemon.errors import DaemonUnreachableError, IncompatibleVersionError, NoSuchTargetError
from torchperfd_daemon.store.model import HISTORY_STEPS
from torchperfd_daemon.views.model import Answer, whole_name

_TIMEOUT_S: Final = 10.0


def known_name(given: str, names: Iterable[str], what: str) -> str:
    """Return the only name with a prefix; the prefix itself where no name is near it.

    Raises:
        NoSuchTargetError: Several have the prefix, or none has and some are near it.
    """
    known = set(names)
    name = whole_name(given, known, what)
    hint = did_you_mean(given, known) if given and name not in known else ""
    if hint:
        raise NoSuchTargetError(f"no {what} {given[:80]}", hint)
    return name


def whole_run(daemon: Any, given: str, *, fleet: bool = False, job: str = "") -> str:
    """Return the name of the only run with a prefix, among the runs of a daemon or of its fleet.

    Args:
        job: The job that the run is of, on any node; empty for any job.

    Raises:
        NoSuchTargetError: Several have the prefix, or none has and some are near it.
    """
    if not given:
        return ""
    answer = daemon.ListRuns(control_pb2.ListRunsRequest(fleet=fleet), timeout=_TIMEOUT_S)
    names = [run.run for run in answer.runs]
    # A job is looked for on all nodes, and these are the runs of one.
    return whole_name(given, names, "run") if job else known_name(given, names, "run")


def capture_argument(context: click.Context, _: click.Parameter, given: Any) -> Any:
    """Complete the ids of captures on a command line; the command's object is their catalog."""
    names = context.obj.ids()
    if isinstance(given, tuple):
        return tuple(known_name(each, names, "capture") for each in given)
    return known_name(given, names, "capture")


_Function = TypeVar("_Function", bound=Callable[..., Any])

run_option = click.option(
    "--run", default="", shell_complete=complete_runs, help="Which run; all by default."
)
job_option = click.option(
    "--job",
    default="",
    shell_complete=complete_jobs,
    help="Only this job, on all nodes that the daemon knows.",
)


def last_option(default: int | None, by_default: str = "") -> Callable[[_Function], _Function]:
    """Return ``--last``.

    Args:
        by_default: What None stands for.
    """
    return click.option(
        "--last",
        type=click.IntRange(1, HISTORY_STEPS),
        default=default,
        show_default=by_default or True,
        help="How many of the newest steps.",
    )


def scope_options(command: _Function) -> _Function:
    """Add ``--run``, ``--job``, ``--fleet`` and ``--prometheus``."""
    return run_option(job_option(fleet_option(series_options(command))))


@dataclass(frozen=True, slots=True)
class Scope:
    """Which runs, and where. Requests raise IncompatibleVersionError if the daemon cannot ask other nodes.

    Attributes:
        run: Its name; empty for all.
        job: Its name; empty for all. A job is looked for on all nodes that the daemon knows.
        fleet: Whether all nodes are asked; a daemon that knows of no others then refuses.
        series: The store of series to ask in place of a daemon, if any.
    """

    run: str = ""
    job: str = ""
    fleet: bool = False
    series: SeriesOptions = NO_SERIES

    @contextlib.contextmanager
    def connect(self, socket: str | None, *, of_ranks: bool = False) -> Iterator[Any]:
        """Yield what answers: a daemon, or a view of the series that has the same calls.

        Series answer if ``--prometheus`` is given. Where it is configured, they also answer ``--fleet``,
        unless the daemon of this node has the run or job that is asked for. Raises as ``_daemon.connect``.

        Args:
            socket: The only path of a daemon to try; the usual places when None.
            of_ranks: Whether the steps of ranks will be asked for.
        """
        is_of_all = of_ranks and not (self.run or self.job)
        view = self.series.view(begin=is_of_all) if self.series.is_given or self.fleet else None
        if view is not None and self.series.is_given:
            yield view
            return
        # Series are read without gRPC.
        from torchperfd_cli.commands import _daemon

        is_of_series = not (self.run or self.job)
        with contextlib.ExitStack() as stack:
            if view is None:
                yield stack.enter_context(_daemon.connect(socket))
                return
            daemon = None
            if not is_of_series:
                with contextlib.suppress(DaemonUnreachableError):
                    daemon = stack.enter_context(_daemon.connect(socket))
            yield daemon if daemon is not None and self._is_known_to(daemon) else view

    def _is_known_to(self, daemon: Any) -> bool:
        """Return whether a daemon has ranks of the run or job on its own node."""
        own = daemon.ListRuns(control_pb2.ListRunsRequest(), timeout=_TIMEOUT_S).runs
        return any(run.run.startswith(self.run) and self.job in ("", run.job_name) for run in own)

    def whole(self, daemon: Any) -> "Scope":
        """Return the same with the whole name of the run, of which a prefix may have been given.

        Raises:
            NoSuchTargetError: Several runs begin so.
        """
        return replace(self, run=whole_run(daemon, self.run, fleet=self.fleet, job=self.job))

    def runs(self, daemon: Any) -> control_pb2.ListRunsResponse:
        """Ask which runs there are."""
        request = control_pb2.ListRunsRequest(job=self.job, fleet=self.fleet)
        answer: control_pb2.ListRunsResponse = self._checked(daemon.ListRuns(request, timeout=_TIMEOUT_S))
        return answer

    def steps(self, daemon: Any, newest: int, ranks: Sequence[int] = ()) -> control_pb2.GetStepsResponse:
        """Ask for the newest steps of ranks, all by default."""
        request = control_pb2.GetStepsRequest(
            run=self.run, ranks=ranks, newest=newest, job=self.job, fleet=self.fleet
        )
        answer: control_pb2.GetStepsResponse = self._checked(daemon.GetSteps(request, timeout=_TIMEOUT_S))
        return answer

    def verdicts(self, daemon: Any) -> control_pb2.DiagnoseResponse:
        """Ask for one verdict on each run."""
        request = control_pb2.DiagnoseRequest(run=self.run, job=self.job, fleet=self.fleet)
        answer: control_pb2.DiagnoseResponse = self._checked(daemon.Diagnose(request, timeout=_TIMEOUT_S))
        return answer

    def _checked(self, answer: Any) -> Any:
        if self.fleet and not answer.nodes:
            raise IncompatibleVersionError(
                "the daemon is older than this command and covers its own node only", "restart it"
            )
        return answer


def missing(*answers: Answer) -> str:
    """Return the daemons that left a request unanswered, as text; empty when there are none."""
    return unreachable_text(peer for answer in answers for peer in answer.unreachable)


def unreachable_text(peers: Iterable[control_pb2.UnreachablePeer]) -> str:
    """Return the daemons of the fleet that did not answer, as a sentence; empty when all did."""
    named = sorted({f"{peer.address} ({peer.reason})" for peer in peers})
    return f"{len(named)} of the fleet's daemons did not answer: {', '.join(named)}" if named else ""
