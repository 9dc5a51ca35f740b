"""A run as its report has it: reads documents of schema ``torchperfd.run/1``, also damaged and old ones."""

import json
import math
from dataclasses import dataclass, field
from typing import Any, Final

from torchperfd.runs.errors import RunFileError

SCHEMA: Final = "torchperfd.run/1"
_MOST_TEXT: Final = 400
_MOST_BLOCKS: Final = 4096


@dataclass(frozen=True, slots=True)
class RankBlocks:
    """Mean times of consecutive blocks of training steps, in seconds per step.

    Attributes:
        steps: Steps in each block.
        step: By block, oldest first.
        phases: The same by phase, for phases that occurred.
    """

    steps: int
    step: tuple[float, ...]
    phases: dict[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank of a run.

    Attributes:
        rank: Its number.
        steps: Training steps, the first included.
        step_seconds: Mean time of the training steps after the first; None without one.
        phase_seconds: Parts of ``step_seconds`` by phase.
        blocks: None where they were not kept.
    """

    rank: int
    steps: int
    step_seconds: float | None
    phase_seconds: dict[str, float]
    blocks: RankBlocks | None

    @property
    def waiting_seconds(self) -> float:
        """Part of a step in ``collective_wait``, waiting for other ranks."""
        return self.phase_seconds.get("collective_wait", 0.0)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run.

    Attributes:
        run: Its name.
        script: Name of the script; empty in reports of older versions.
        host: Where rank 0 ran.
        started: Unix seconds; None in reports of older versions.
        ended: The same, when the script had ended.
        world_size: Ranks of the job.
        exit_state: ``finished``, ``failed`` or ``interrupted``; empty if unknown.
        environment: Versions, device, CPUs and threads, by name.
        cause: Name of the verdict's cause; empty without a verdict.
        verdict: The verdict in one sentence; empty without one.
        ranks: By number.
    """

    run: str
    script: str
    host: str
    started: float | None
    ended: float | None
    world_size: int
    exit_state: str
    environment: dict[str, str] = field(default_factory=dict)
    cause: str = ""
    verdict: str = ""
    ranks: tuple[RankRecord, ...] = ()

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

    Args:
        content: The whole file.
        source: Its name, for messages.

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
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise RunFileError(
            f"{source} is no report of a run: its schema is not {SCHEMA}",
            "`torchperfd run --report FILE` writes one",
        )
    try:
        return _record(document)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RunFileError(f"the report in {source} is damaged ({_clean(str(error))})") from error


def _record(document: dict[str, Any]) -> RunRecord:
    verdict = document.get("verdict") or {}
    exit_ = document.get("exit") or {}
    ranks = tuple(sorted((_rank(each) for each in document["ranks"]), key=lambda rank: rank.rank))
    facts = {**(document.get("versions") or {}), **(document.get("environment") or {})}
    return RunRecord(
        run=_text(document["run"]),
        script=_text(document.get("script")),
        host=_text(document.get("host")),
        started=_optional(document.get("started_seconds")),
        ended=_optional(document.get("ended_seconds")),
        world_size=_count(document.get("world_size") or len(ranks)),
        exit_state=_text(exit_.get("state")),
        environment={_text(name): _text(str(value)) for name, value in facts.items() if value is not None},
        cause=_text(verdict.get("cause")),
        verdict=_text(verdict.get("summary")),
        ranks=ranks,
    )


def _rank(document: dict[str, Any]) -> RankRecord:
    train, first = document["train"], document.get("warmup") or {}
    steps = _count(train["steps"])
    # As in the report: the first step is left out once another has followed.
    is_apart = steps > 1 and _count(first.get("steps", 0)) > 0
    steady = steps - 1 if is_apart else steps
    seconds, phases = _number(train["step_seconds_total"]), _phases(train)
    if is_apart:
        seconds -= _number(first["step_seconds_total"])
        for name, part in _phases(first).items():
            phases[name] = phases.get(name, 0.0) - part
    return RankRecord(
        rank=_count(document["rank"]),
        steps=steps,
        step_seconds=max(0.0, seconds) / steady if steady else None,
        phase_seconds={name: max(0.0, each) / steady for name, each in phases.items() if steady},
        blocks=_blocks(document.get("blocks")),
    )


def _phases(kind: dict[str, Any]) -> dict[str, float]:
    phases = kind.get("phases") or {}
    return {_text(name): _number(phase["seconds_total"]) for name, phase in phases.items()}


def _blocks(document: dict[str, Any] | None) -> RankBlocks | None:
    if document is None:
        return None
    steps, step = _count(document["steps"]), _column(document["step_seconds"])
    phases = {_text(name): _column(values) for name, values in document["phases"].items()}
    if steps < 1 or any(len(column) != len(step) for column in phases.values()):
        raise ValueError("its blocks are of different lengths")
    return RankBlocks(steps, step, phases)


def _column(values: list[Any]) -> tuple[float, ...]:
    if len(values) > _MOST_BLOCKS:
        raise ValueError("it has too many blocks")
    return tuple(map(_number, values))


def _number(value: Any) -> float:
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    # 1e12 seconds and steps are beyond any run; products of such numbers must not overflow.
    if not 0 <= number <= 1e12:
        raise ValueError("a number is missing, negative or not finite")
    return number


def _optional(value: Any) -> float | None:
    return None if value is None else _number(value)


def _count(value: Any) -> int:
    return int(_number(value))


def _text(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError("a text is missing")
    return _clean(value)


def _clean(text: str) -> str:
    text = text[:_MOST_TEXT]
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)
