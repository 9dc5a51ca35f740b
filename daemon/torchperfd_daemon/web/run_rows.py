"""Rows of runs on the live page: those of present runs, and the file that keeps those of the last day."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from torchperfd.model.messages import to_document
from torchperfd.v1 import access, control_pb2
from torchperfd_daemon import untrusted_files
from torchperfd_daemon.captures import folder
from torchperfd_daemon.store.model import RankIdentity, State, Totals
from torchperfd_daemon.store.store import Rank
from torchperfd_daemon.text import clean_fields
from torchperfd_daemon.views import history
from torchperfd_daemon.views.history import Durations, StepPercentiles, sparkline
from torchperfd_daemon.views.live import run_status_dict
from torchperfd_daemon.views.model import STALLED, STOPPED, rank_state, reported_state

GpuOf = Callable[[RankIdentity], str]
"""Returns the index of a rank's GPU on this node; empty if it is not known."""

_STATES: Final = (
    STALLED,
    STOPPED,
    "training",
    "validating",
    "checkpointing",
    "starting",
    "finished",
    "gone",
)


def run_state(ranks: Sequence[Rank] | Sequence[control_pb2.RankStatus]) -> str:
    """Return the state of a run: the first in the order of attention that one of its ranks is in.

    Once all ranks have left, it is the state in which the run ended.
    """
    if ranks and not any(rank.connected for rank in ranks):
        return ended_state(ranks)
    states = {rank_state(rank) for rank in ranks}
    return next((state for state in _STATES if state in states), "starting")


def ended_state(ranks: Iterable[Rank | control_pb2.RankStatus]) -> str:
    """Return the state of a run whose ranks have left: finished if each of them had finished."""
    finished = (reported_state(rank) == State.FINISHED.value for rank in ranks)
    return "finished" if all(finished) else "gone"


def run_row(run: control_pb2.Run, ranks: Sequence[Rank], gpu_of: GpuOf) -> dict[str, Any]:
    """Return a run with its ranks.

    Args:
        ranks: Those of this node, whose data is beyond that of the message.
    """
    here = {rank.identity.rank: rank for rank in ranks}
    row = run_status_dict(run)
    for own, status in zip(row["ranks"], run.ranks, strict=True):
        rank = here.get(status.identity.rank)
        if rank is not None and rank.identity.node == status.identity.node:
            own.update(_rank_more(rank, gpu_of))
    connected = [status for status in run.ranks if status.connected]
    # Of a run that has ended, its last steps; it makes no more of them per second.
    slowest = max((status.step_seconds for status in connected or run.ranks), default=0.0)
    samples = [value for own in row["ranks"] if own["connected"] and (value := own.get("samples_per_second"))]
    row.update(
        state=run_state(run.ranks),
        step_seconds=slowest or None,
        whole_step_seconds=max((rank.totals.steady_means()[1] for rank in ranks), default=0.0) or None,
        steps_per_second=1 / slowest if slowest and connected else None,
        samples_per_second=sum(samples) if samples else None,
        sparkline=sparkline(ranks) if ranks else None,
        outcome=outcome_of(ranks),
        gpus=sorted({gpu for own in row["ranks"] if (gpu := own.get("gpu"))}),
    )
    return row


def add_percentiles(row: dict[str, Any], ranks: Sequence[Rank], durations: Durations) -> None:
    """Add the percentiles of the step time to a run and to its ranks of this node. May run on any thread."""
    row["step_percentiles"] = history.run_percentiles(durations)
    nodes = {rank.identity.rank: rank.identity.node for rank in ranks}
    found = {each.rank: each for each in history.rank_percentiles(durations)}
    for own in row["ranks"]:
        of_rank = found.get(own["rank"])
        if of_rank is not None and own["node"] == nodes[of_rank.rank]:
            own.update(step_p50_seconds=of_rank.p50_seconds, step_p95_seconds=of_rank.p95_seconds)


def outcome_of(ranks: Iterable[Rank]) -> str:
    """Return what a run made of the promise of an earlier one, in one line; empty without one."""
    return next((rank.outcome for rank in ranks if rank.outcome), "")


def samples_per_step(totals: Totals) -> float | None:
    """Return the mean number of samples of a training step; None where samples are not counted."""
    steps = totals.train.steps
    return totals.train.samples / steps if steps and totals.train.samples else None


def _rank_more(rank: Rank, gpu_of: GpuOf) -> Mapping[str, Any]:
    totals, step = rank.totals, rank.mean_step_seconds()
    samples = samples_per_step(totals)
    cuda, loader, memory = totals.cuda, totals.loader, totals.host_memory
    return {
        "world_size": rank.identity.world_size,
        "framework": rank.framework or None,
        "gpu": gpu_of(rank.identity) or None,
        "samples_per_second": samples / step if samples and step else None,
        "host_memory": None if memory is None else to_document(memory),
        "cuda": None if cuda is None else to_document(cuda, without=("device_uuid",)),
        "loader": None if loader is None else {"workers": loader.workers, "ready": totals.loader_ready},
    }


log = logging.getLogger("torchperfd.http")

RUNS_FOLDER: Final = ".page"

MAX_RUNS_FILE_BYTES: Final = 1 << 20

Mark = dict[str, str | int | float | None]
"""What happened in a run, as documents have it."""


@dataclass(slots=True)
class Sparkline:
    """The run's mean step over ten minutes; see ``views.history.sparkline``."""

    until_unix_seconds: int | None
    interval_seconds: int
    step_seconds: list[float | None]


@dataclass(slots=True)
class RunRow:
    """What a document has of a run that has ended."""

    run: str
    job_name: str
    world_size: int
    state: str
    started_unix_seconds: float
    ended_unix_seconds: float
    steps: int
    step_seconds: float | None
    sparkline: Sparkline
    step_percentiles: StepPercentiles | None = None
    outcome: str = ""


@dataclass(slots=True)
class KeptRun:
    """A run in the file.

    Attributes:
        marks: The oldest first.
        verdict: The message, packed; empty without one.
        users: Whose its ranks were.
    """

    row: RunRow
    marks: list[Mark]
    verdict: bytes
    users: list[int | None]


class RunsFile:
    """Reads and writes the file. Where it cannot be used, one warning is logged and nothing is kept.

    Args:
        directory: Folder of the file, created on first use.
        node: Name of the node. Each has its own file, since nodes may share a home directory.
    """

    def __init__(self, directory: Path, node: str) -> None:
        self._directory = directory
        self._file = f"{node.replace('/', '_') or 'node'}.json"
        self._has_warned = False

    def load(self) -> list[KeptRun]:
        """Return the runs; none from a file that is missing, damaged or too long."""
        try:
            with self._opened() as held, open(folder.open_file(held, self._file), "rb") as file:  # noqa: PTH123
                content = file.read(MAX_RUNS_FILE_BYTES + 1)
            runs = untrusted_files.decode(content, list[KeptRun])
        except FileNotFoundError:
            return []
        except (OSError, untrusted_files.DamagedError) as error:
            log.warning("what was kept of earlier runs is not shown: %s", error)
            return []
        for run in runs:
            clean_fields(run)
        return runs

    def save(self, runs: Iterable[KeptRun]) -> None:
        """Replace the file by runs, the most important first: those beyond a megabyte are left out."""
        parts: list[bytes] = []
        left = MAX_RUNS_FILE_BYTES - len(b"[]")
        for run in runs:
            part = msgspec.json.encode(run)
            left -= len(part) + len(b",")
            if left < 0:
                break
            parts.append(part)
        try:
            self._directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._directory.mkdir(mode=0o700, exist_ok=True)
            with self._opened() as held:
                folder.write(held, self._file, b"[%s]" % b",".join(parts))
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("runs that end are not shown any more once the daemon has stopped: %s", error)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Hold the folder open."""
        with folder.opened(self._directory) as held:
            status = os.fstat(held)
            if status.st_uid != os.geteuid() or access.may_others_write(status):
                raise PermissionError(f"{self._directory} must be a folder that only this user can write to")
            yield held
