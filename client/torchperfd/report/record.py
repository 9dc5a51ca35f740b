"""A run as its report has it: reads documents of schema ``torchperfd.run/1``, also damaged and old ones."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from torchperfd.errors import TorchperfdError
from torchperfd.model.formatting import MAX_LARGE, clean, count, number, optional, text
from torchperfd.model.messages import from_document
from torchperfd.model.step_account import Account
from torchperfd.model.verdict_document import SettledAdvice
from torchperfd.report.ending import Ending
from torchperfd.report.promise import Promise, PromiseOutcome, RunSource, promises_of
from torchperfd.report.rank import RUN_SCHEMA

_MAX_BLOCKS: Final = 4096

T = TypeVar("T")


class RunFileError(TorchperfdError):
    """A file is no report of a run, or cannot be read."""


class NoSuchRunError(TorchperfdError):
    """No kept run has the name, or several begin with it."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class RankBlocks:
    """Mean times of consecutive blocks of training steps, in seconds per step.

    Attributes:
        steps: Steps in each block.
        step: By block, oldest first.
        phases: The same by phase, for phases that occurred.
        ranks: How many ranks this is the mean of.
    """

    steps: int
    step: tuple[float, ...]
    phases: dict[str, tuple[float, ...]]
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank of a run.

    Attributes:
        steps: Training steps, the first included.
        step_seconds: Mean time of the training steps after the first; None without one.
        phase_seconds: Parts of ``step_seconds`` by phase.
        blocks: None where they were not kept.
        samples_per_step: Mean of the same steps; 0 if unknown.
    """

    rank: int
    steps: int
    step_seconds: float | None
    phase_seconds: dict[str, float]
    blocks: RankBlocks | None
    samples_per_step: float = 0.0

    @property
    def waiting_seconds(self) -> float:
        """Part of a step in ``collective_wait``, waiting for other ranks."""
        return self.phase_seconds.get("collective_wait", 0.0)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run.

    Attributes:
        script: Name of the script; empty in reports of older versions.
        host: Where rank 0 ran.
        started: Unix seconds; None in reports of older versions.
        ended: The same, when the script had ended.
        environment: Versions, device, CPUs and threads, by name.
        cause: Name of the verdict's cause; empty without a verdict.
        verdict: The verdict in one sentence; empty without one.
        ranks: By number.
        unseen_ranks: Ranks of the job that the verdict knows nothing about.
        loader_advice: What it was advised on its loaders; None if that was not settled.
        account: Where each millisecond of the step went; None without one, and in reports of older versions.
        source: What it has executed; None in reports of older versions.
        settings: Workers and batch size of its loader, by name, as far as they are known.
        promises: What its verdict promises, in the order of the card.
        outcome: What it has made of the promise of an earlier run; None without one.
    """

    run: str
    script: str
    host: str
    started: float | None
    ended: float | None
    world_size: int
    ending: Ending
    environment: dict[str, str] = field(default_factory=dict)
    cause: str = ""
    verdict: str = ""
    ranks: tuple[RankRecord, ...] = ()
    unseen_ranks: int = 0
    loader_advice: SettledAdvice | None = None
    account: Account | None = None
    source: RunSource | None = None
    settings: dict[str, str] = field(default_factory=dict)
    promises: tuple[Promise, ...] = ()
    outcome: PromiseOutcome | None = None

    @property
    def in_effect(self) -> dict[str, str]:
        """Versions, device, CPUs, threads and settings of the loader, by name."""
        return {**self.environment, **self.settings}

    @property
    def samples_per_step(self) -> float:
        """Samples in a step of one rank, as a mean over ranks; 0 if unknown."""
        known = [rank.samples_per_step for rank in self.ranks if rank.samples_per_step]
        return sum(known) / len(known) if known else 0.0

    @property
    def steps(self) -> int:
        """Training steps of the rank that made most."""
        return max((rank.steps for rank in self.ranks), default=0)

    @property
    def step_seconds(self) -> float | None:
        """Mean step time over all ranks, first steps left out; None if unknown."""
        known = [rank.step_seconds for rank in self.ranks if rank.step_seconds is not None]
        return sum(known) / len(known) if known else None


def read_record(content: bytes, source: str) -> RunRecord:
    """Read a report; text in it is made safe for a terminal.

    Raises:
        RunFileError: It is damaged, or something else.
    """
    return read_document(content, source, record_of)


def read_document(content: bytes, source: str, read: Callable[[dict[str, Any]], T]) -> T:
    """Return what a function reads from a report's document.

    Args:
        read: May raise whatever a missing or wrong value in the document leads to.

    Raises:
        RunFileError: It is damaged, or something else.
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RunFileError(
            f"{source} is no report of a run: not JSON, or cut off",
            "`torchperfd run --report FILE` writes one",
        ) from error
    if not isinstance(document, dict) or document.get("schema") != RUN_SCHEMA:
        raise RunFileError(
            f"{source} is no report of a run: its schema is not {RUN_SCHEMA}",
            "`torchperfd run --report FILE` writes one",
        )
    return read_sound(lambda: read(document), source)


def read_sound(read: Callable[[], T], source: str) -> T:
    """Return what a function reads from a document that may be damaged.

    Raises:
        RunFileError: The function has raised what a missing or wrong value leads to.
    """
    try:
        return read()
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError) as error:
        raise RunFileError(f"the report in {source} is damaged ({clean(str(error))})") from error


def record_of(document: dict[str, Any]) -> RunRecord:
    """Return a run by its document; see :func:`read_document` for errors."""
    verdict = document.get("verdict") or {}
    account = verdict.get("account")
    ranks = tuple(sorted((_rank(each) for each in document["ranks"]), key=lambda rank: rank.rank))
    facts = {**(document.get("versions") or {}), **(document.get("environment") or {})}
    record = RunRecord(
        run=text(document["run"]),
        script=text(document.get("script")),
        host=text(document.get("host")),
        started=optional(document.get("started_seconds")),
        ended=optional(document.get("ended_seconds")),
        world_size=count(document.get("world_size") or len(ranks)),
        ending=from_document(document.get("exit") or {}, Ending),
        environment=_texts(facts),
        cause=text(verdict.get("cause")),
        verdict=text(verdict.get("summary")),
        ranks=ranks,
        unseen_ranks=count(verdict.get("unseen_ranks") or 0),
        loader_advice=SettledAdvice.from_dict(document.get("loader_advice")),
        account=None if account is None else Account.from_document(account),
        source=from_document(source, RunSource) if (source := document.get("source")) else None,
        settings=_texts(document.get("settings") or {}),
        outcome=PromiseOutcome.of_document(document.get("promise")),
    )
    return replace(record, promises=promises_of(verdict, record.step_seconds))


def _texts(facts: dict[str, Any]) -> dict[str, str]:
    return {text(name): text(str(value)) for name, value in facts.items() if value is not None}


def _rank(document: dict[str, Any]) -> RankRecord:
    train, first = document["train"], document.get("warmup") or {}
    steps = count(train["steps"])
    # As in the report: the first step is left out once another has followed.
    is_apart = steps > 1 and count(first.get("steps", 0)) > 0
    steady = steps - 1 if is_apart else steps
    seconds, phases = number(train["step_seconds_total"]), _phases(train)
    samples = number(train.get("samples") or 0, MAX_LARGE)
    if is_apart:
        seconds -= number(first["step_seconds_total"])
        samples -= number(first.get("samples") or 0, MAX_LARGE)
        for name, part in _phases(first).items():
            phases[name] = phases.get(name, 0.0) - part
    return RankRecord(
        rank=count(document["rank"]),
        steps=steps,
        step_seconds=max(0.0, seconds) / steady if steady else None,
        phase_seconds={name: max(0.0, each) / steady for name, each in phases.items() if steady},
        blocks=_blocks(document.get("blocks")),
        samples_per_step=max(0.0, samples) / steady if steady else 0.0,
    )


def _phases(kind: dict[str, Any]) -> dict[str, float]:
    phases = kind.get("phases") or {}
    return {text(name): number(phase["seconds_total"]) for name, phase in phases.items()}


def _blocks(document: dict[str, Any] | None) -> RankBlocks | None:
    if document is None:
        return None
    steps, ranks = count(document["steps"]), count(document.get("ranks", 1))
    if steps < 1 or ranks < 1:
        raise ValueError("its blocks are of no steps, or of no ranks")
    step = _column(document["step_seconds"], ranks)
    phases = {text(name): _column(values, ranks) for name, values in document["phases"].items()}
    if any(len(column) != len(step) for column in phases.values()):
        raise ValueError("its blocks are of different lengths")
    return RankBlocks(steps, step, phases, ranks)


def _column(values: list[Any], ranks: int) -> tuple[float, ...]:
    """Return the mean of what is summed over ranks."""
    if len(values) > _MAX_BLOCKS:
        raise ValueError("it has too many blocks")
    return tuple(number(value) / ranks for value in values)
