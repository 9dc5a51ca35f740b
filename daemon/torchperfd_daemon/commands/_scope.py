"""The runs of a live command: its options, its requests, and the daemons that did not answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import click

from torchperfd.v1 import control_pb2
from torchperfd_daemon.commands._completion import complete_jobs, complete_runs
from torchperfd_daemon.commands._daemon import unreachable_text
from torchperfd_daemon.commands._names import whole_run
from torchperfd_daemon.commands._options import fleet_option
from torchperfd_daemon.errors import IncompatibleVersionError
from torchperfd_daemon.store import HISTORY_STEPS

_TIMEOUT_S: Final = 10.0

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Answer = TypeVar(
    "_Answer", control_pb2.ListRunsResponse, control_pb2.GetStepsResponse, control_pb2.DiagnoseResponse
)

run_option = click.option(
    "--run", default="", shell_complete=complete_runs, help="Which run; all by default."
)
job_option = click.option(
    "--job",
    default="",
    shell_complete=complete_jobs,
    help="Only this job, on all nodes that the daemon knows.",
)


def last_option(default: int) -> Callable[[_Function], _Function]:
    """Return the option for the number of newest steps."""
    return click.option(
        "--last",
        type=click.IntRange(1, HISTORY_STEPS),
        default=default,
        show_default=True,
        help="How many of the newest steps.",
    )


def scope_options(command: _Function) -> _Function:
    """Add ``--run``, ``--job`` and ``--fleet``."""
    return run_option(job_option(fleet_option(command)))


@dataclass(frozen=True, slots=True)
class Scope:
    """Which runs, and where.

    Attributes:
        run: Its name; empty for all.
        job: Its name; empty for all. A job is looked for on all nodes that the daemon knows.
        fleet: Whether all nodes are asked; a daemon that knows of no others then refuses.
    """

    run: str = ""
    job: str = ""
    fleet: bool = False

    def whole(self, daemon: Any) -> "Scope":
        """Return the same with the whole name of the run, of which a prefix may have been given.

        Raises:
            NoSuchTargetError: Several runs begin so.
        """
        return replace(self, run=whole_run(daemon, self.run, fleet=self.fleet, job=self.job))

    def runs(self, daemon: Any) -> control_pb2.ListRunsResponse:
        """Ask which runs there are.

        Raises:
            IncompatibleVersionError: The daemon cannot ask other nodes.
        """
        request = control_pb2.ListRunsRequest(job=self.job, fleet=self.fleet)
        answer: control_pb2.ListRunsResponse = daemon.ListRuns(request, timeout=_TIMEOUT_S)
        return self._checked(answer)

    def steps(self, daemon: Any, newest: int, ranks: Sequence[int] = ()) -> control_pb2.GetStepsResponse:
        """Ask for the newest steps of ranks, all by default.

        Raises:
            IncompatibleVersionError: The daemon cannot ask other nodes.
        """
        request = control_pb2.GetStepsRequest(
            run=self.run, ranks=ranks, newest=newest, job=self.job, fleet=self.fleet
        )
        answer: control_pb2.GetStepsResponse = daemon.GetSteps(request, timeout=_TIMEOUT_S)
        return self._checked(answer)

    def verdicts(self, daemon: Any) -> control_pb2.DiagnoseResponse:
        """Ask for one verdict on each run.

        Raises:
            IncompatibleVersionError: The daemon cannot ask other nodes.
        """
        request = control_pb2.DiagnoseRequest(run=self.run, job=self.job, fleet=self.fleet)
        answer: control_pb2.DiagnoseResponse = daemon.Diagnose(request, timeout=_TIMEOUT_S)
        return self._checked(answer)

    def _checked(self, answer: _Answer) -> _Answer:
        if self.fleet and not answer.nodes:
            raise IncompatibleVersionError(
                "the daemon is older than this command and covers its own node only", "restart it"
            )
        return answer


def missing(*answers: _Answer) -> str:
    """Return the daemons that left a request unanswered, as text; empty when there are none."""
    return unreachable_text(peer for answer in answers for peer in answer.unreachable)
