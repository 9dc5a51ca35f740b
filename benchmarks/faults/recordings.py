"""Recordings of jobs: what diagnosis was given at each sample, and the truth about the job.

A recording is a file ``NAME.jsonl.gz``. Its first line is the job: the trial, as ``--json`` writes it, and
the load of the machine. Each further line is a sample by :mod:`benchmarks.faults.recorder`, from the job's
start until after its fault. A sample has only those steps that the sample before it did not have;
:func:`read` puts them together.
"""

import gzip
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from benchmarks.faults.trial import Trial

from torchperfd.model.loader_facts import WorkerCost
from torchperfd_daemon.diagnosis.detect.straggler import RankWork
from torchperfd_daemon.diagnosis.edits import Pauses
from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.observer.slowdown import Slowdown
from torchperfd_daemon.store.model import HISTORY_STEPS

Float64 = npt.NDArray[np.float64]
Made = TypeVar("Made")
Named = tuple[str, int | None, float]
"""A verdict: value of the cause, rank, and cost in seconds per step."""

ENDING: Final = ".jsonl.gz"
_DIGITS: Final = 12
"""Significant ones: Unix seconds keep their milliseconds."""


@dataclass(frozen=True, slots=True)
class RankSample:
    """What diagnosis knew of one rank.

    Attributes:
        evidence: Of its newest window, with its lateness and with its past in ``before``.
        fills_window: Whether the window has its full length, without which no run is called healthy.
        p95_seconds: The 95th percentile of its newest steps.
        window_steps: How many of the newest steps stragglers are sought in.
        next_step: The number of the newest step, plus one.
        duration_seconds: Its newest steps, as many as the daemon keeps, the oldest first; shape (steps,).
        phase_seconds: Exclusive host time by phase in the same steps.
        device_phase_seconds: Mean steps on its device, one for each of the newest samples; empty without.
        collections: Its garbage collections by generation, since its steps last changed.
    """

    evidence: RankEvidence
    fills_window: bool
    p95_seconds: float
    window_steps: int
    next_step: int
    duration_seconds: Float64
    phase_seconds: dict[str, Float64]
    device_phase_seconds: dict[str, Float64]
    collections: tuple[Pauses, ...]

    @property
    def first_step(self) -> int:
        """The number of the oldest step held."""
        return self.next_step - len(self.duration_seconds)

    @property
    def device_samples(self) -> int:
        """How many mean steps on its device there are."""
        return min((len(column) for column in self.device_phase_seconds.values()), default=0)

    def work(self, first: int, end: int) -> RankWork:
        """Return its steps on the host from one number until another."""
        places = slice(first - self.first_step, end - self.first_step)
        columns = {name: column[places] for name, column in self.phase_seconds.items()}
        return RankWork(self.evidence.rank, columns, self.evidence.stage)

    @property
    def window_work(self) -> RankWork:
        """The steps on the host that stragglers are sought in."""
        return self.work(max(self.first_step, self.next_step - self.window_steps), self.next_step)

    def device_work(self, count: int) -> RankWork:
        """Return the newest mean steps on its device, so many."""
        columns = {name: column[-count:] for name, column in self.device_phase_seconds.items()}
        return RankWork(self.evidence.rank, columns, self.evidence.stage, are_means=True)


@dataclass(frozen=True, slots=True)
class Sample:
    """What diagnosis was given at one moment.

    Attributes:
        unix: When, Unix seconds.
        now: The same in monotonic seconds.
        since: When the present regime of steps began, in monotonic seconds; negative infinity: at the start.
        slowdown: Since when the run is slower; None where it is not.
        period: The number of steps from one long step to the next.
        past_step_seconds: The step before the run became slower, as its periods show it.
        cost: Of a loader's worker on this machine.
        found: The verdicts of this sample at the time of the recording.
        published: The verdicts that were published before it.
    """

    unix: float
    now: float
    since: float
    slowdown: Slowdown | None
    period: int
    past_step_seconds: float | None
    cost: WorkerCost
    ranks: tuple[RankSample, ...]
    found: tuple[Named, ...]
    published: tuple[Named, ...]

    @property
    def evidence(self) -> list[RankEvidence]:
        return [rank.evidence for rank in self.ranks]


@dataclass(frozen=True, slots=True)
class Recording:
    """A job: its truth and its answers, and what diagnosis was given.

    Attributes:
        onset_unix: When the fault began, Unix seconds.
        load: The machine's load average of a minute, at the job's start and end.
    """

    trial: Trial
    onset_unix: float
    load: tuple[float, float]
    samples: tuple[Sample, ...]

    @property
    def until_end(self) -> list[Sample]:
        """The samples until the last answer, after which the fault ended."""
        answers = self.trial.answers
        end = self.onset_unix + (answers[-1].after_onset if answers else 0.0)
        return [sample for sample in self.samples if sample.unix <= end]

    @property
    def with_fault(self) -> list[Sample]:
        """The samples that were taken during the fault."""
        return [sample for sample in self.until_end if sample.unix >= self.onset_unix]


def compact_line(document: Mapping[str, Any]) -> str:
    """Return a line of JSON in which floats are rounded and dataclasses are objects."""
    return f"{json.dumps(_plain(document), separators=(',', ':'))}\n"


def write(directory: Path, trial: Trial, onset_unix: float, load: tuple[float, float], samples: Path) -> Path:
    """Write a job's recording, and return its path.

    Args:
        directory: Where recordings are kept; made if it is not there.
        trial: The job, with its answers.
        onset_unix: When its fault began, Unix seconds.
        load: The machine's load average of a minute, at the job's start and end.
        samples: The file that :mod:`benchmarks.faults.recorder` has written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    plan = trial.plan
    where = "busy " if plan.hogs else ""
    words = f"{where}{plan.device} {plan.fault} {plan.model} {plan.seed}"
    name = re.sub(r"[^a-z0-9]+", "-", words.lower())
    path = directory / f"{name}{ENDING}"
    head = {"trial": trial.to_dict(), "onset_unix": onset_unix, "load": load}
    with gzip.open(path, "wt") as file:
        file.write(f"{json.dumps(head)}\n")
        # A line that was being written when the daemon was killed is left out.
        file.write("".join(line for line in samples.read_text().splitlines(True) if line.endswith("\n")))
    return path


def read(path: Path) -> Recording:
    with gzip.open(path, "rt") as file:
        head, *lines = map(json.loads, file)
    return Recording(
        Trial.from_dict(head["trial"]), head["onset_unix"], tuple(head["load"]), tuple(_samples(lines))
    )


def read_all(directory: Path) -> Iterator[Recording]:
    """Yield the recordings in a directory, by name."""
    yield from map(read, sorted(directory.glob(f"*{ENDING}")))


def _samples(lines: Sequence[dict[str, Any]]) -> Iterator[Sample]:
    steps: dict[int, _Steps] = {}
    for line in lines:
        ranks = []
        for each in line.pop("ranks"):
            evidence = rebuild(RankEvidence, each.pop("evidence"))
            own = steps.setdefault(evidence.rank, _Steps())
            own.add(each.pop("duration_ns"), each.pop("phase_ns"))
            ranks.append(
                RankSample(
                    evidence=evidence,
                    duration_seconds=own.durations,
                    phase_seconds=dict(own.phases),
                    device_phase_seconds={
                        name: np.array(column) for name, column in each.pop("device_phase_seconds").items()
                    },
                    collections=tuple(rebuild(Pauses, pauses) for pauses in each.pop("collections")),
                    **each,
                )
            )
        yield Sample(
            ranks=tuple(ranks),
            slowdown=rebuild(Slowdown | None, line.pop("slowdown")),
            cost=rebuild(WorkerCost, line.pop("cost")),
            found=tuple(map(tuple, line.pop("found"))),
            published=tuple(map(tuple, line.pop("published"))),
            **line,
        )


class _Steps:
    """The newest steps of one rank, as many as the daemon keeps."""

    def __init__(self) -> None:
        self.durations: Float64 = np.zeros(0)
        self.phases: dict[str, Float64] = {}

    def add(self, duration_ns: Sequence[int], phase_ns: Mapping[str, Sequence[int]]) -> None:
        """Add steps, and drop the oldest; arrays that were handed out stay as they are."""
        held, made = len(self.durations), len(duration_ns)
        self.durations = self._joined(self.durations, duration_ns)
        for name in {**self.phases, **phase_ns}:
            old = self.phases.get(name, np.zeros(held))
            self.phases[name] = self._joined(old, phase_ns.get(name, [0] * made))

    @staticmethod
    def _joined(old: Float64, fresh_ns: Sequence[int]) -> Float64:
        return np.concatenate([old, np.array(fresh_ns, dtype=np.float64) / 1e9])[-HISTORY_STEPS:]


def rebuild(kind: Any, value: Any) -> Any:
    """Return the value of a type from what JSON made of it.

    Fields that the type no longer has are dropped, and those that it did not have yet get their default, so
    that a recording stays readable while the evidence grows.
    """
    if value is None:
        return None
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        known = {field.name for field in fields(kind) if field.init}
        make: Any = kind
        return make(**{name: rebuild(hints[name], each) for name, each in value.items() if name in known})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return rebuild(next(each for each in arguments if each is not type(None)), value)
    if isinstance(value, list):
        made = [rebuild(arguments[0] if arguments else Any, each) for each in value]
        return tuple(made) if origin is tuple else made
    if isinstance(value, dict) and arguments:
        # JSON's keys are text.
        return {arguments[0](key): rebuild(arguments[1], each) for key, each in value.items()}
    return value


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float | np.floating):
        return float(f"{float(value):.{_DIGITS}g}")
    return int(value) if isinstance(value, np.integer) else value
