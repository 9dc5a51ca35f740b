"""The report of a run at its end: its facts, and the file that is kept."""

import contextlib
import os
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from torchperfd._version import __version__
from torchperfd.launch.exit_facts import exit_document
from torchperfd.launch.keeping_options import KeepingOptions
from torchperfd.report.document import blocks_document
from torchperfd.runs.store import RunStore
from torchperfd.v1 import contract

if TYPE_CHECKING:
    from torchperfd.client import Client

_LEFT_S: Final = 0.2
"""Of the time until the deadline, what is left for the daemon."""


def add_facts(
    document: dict[str, Any], client: "Client", *, began: float, ended: BaseException | None
) -> None:
    """Add to a run's document what comparisons need.

    Args:
        document: Of schema ``torchperfd.run/1``.
        client: Of this process, after its loop has ended.
        began: When the run began, Unix seconds.
        ended: What the script raised; None where it reached its end.
    """
    identity = client.parts.identity
    # Behind the facts, so that a reader finds these in the first kilobyte.
    verdict, ranks = document.pop("verdict"), document.pop("ranks")
    document |= {
        "source": None,
        "script": identity.script,
        "job": identity.job_name,
        "host": identity.node or socket.gethostname(),
        "world_size": identity.world_size,
        "started_seconds": began,
        "ended_seconds": time.time(),
        "exit": exit_document(ended),
        "versions": {
            "torchperfd": __version__,
            "python": identity.python_version,
            "torch": str(torch.__version__) if (torch := sys.modules.get("torch")) else None,
        },
        "environment": _environment(),
        "settings": {},
        "promise": None,
        "loader_advice": document.get("loader_advice"),
        "verdict": verdict,
        "ranks": ranks,
    }
    blocks = blocks_document(client.parts.flusher.blocks.sums(), client.parts.instruments.names)
    for rank in document["ranks"]:
        if rank["rank"] == client.rank:
            rank["blocks"] = blocks


class ReportWriter:
    """Keeps the report of a run, on a thread of its own: a disk that hangs must not delay the exit.

    Args:
        options: Where to.
        document: Must not change any more.
    """

    def __init__(self, options: KeepingOptions, document: dict[str, Any]) -> None:
        self.run_id = ""
        self.problem = ""
        self._store = RunStore(options.directory or contract.user_runs_dir())
        self._document = document
        self._thread = threading.Thread(target=self._keep, name="torchperfd-keep-run", daemon=True)
        self._thread.start()

    def outcome(self, deadline: float) -> str:
        """Wait until the report is kept, or until ``deadline`` on the monotonic clock; return the outcome.

        Returns:
            The command that shows the report, or why it is not kept.
        """
        self._thread.join(max(0.05, deadline - _LEFT_S - time.monotonic()))
        if self._thread.is_alive():
            return "not: the disk is too slow"
        return f"not: {self.problem}" if self.problem else f"torchperfd runs show {self.run_id}"

    def _keep(self) -> None:
        try:
            self.run_id = self._store.keep(self._document)
        except Exception as error:  # noqa: BLE001 - the run is over, and its report is no reason to fail
            self.problem = str(error)


def _environment() -> dict[str, Any]:
    torch: Any = sys.modules.get("torch")
    facts: dict[str, Any] = {"cpus": len(os.sched_getaffinity(0))}
    # Facts that a comparison can do without: a torch that lacks one is no reason to keep no report.
    with contextlib.suppress(Exception):
        facts["threads"] = int(torch.get_num_threads())
        if torch.cuda.is_initialized():
            facts["device"] = str(torch.cuda.get_device_name())
    return facts
