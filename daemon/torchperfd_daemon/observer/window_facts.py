"""Evidence of a rank that follows from its totals at the ends of a window."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Final

from torchperfd.sync_wait import SyncWait
from torchperfd.timed_line import TimedLine
from torchperfd_daemon.diagnosis import RankEvidence
from torchperfd_daemon.store import GcTotal, PhaseTotal, Totals

_WAIT: Final = "collective_wait"
_DATA: Final = "data"
_MIN_STARTS: Final = 2


@dataclass(frozen=True, slots=True)
class WindowEdge:
    """The totals at the beginning of a window, as far as evidence follows from their growth."""

    steps: int
    gc: tuple[GcTotal, ...]
    sync_waits: tuple[SyncWait, ...]
    collect_calls: tuple[TimedLine, ...]
    script_collectives: tuple[TimedLine, ...]
    device_lag: PhaseTotal

    @classmethod
    def of(cls, totals: Totals) -> "WindowEdge":
        """Return what is kept of a rank's totals."""
        return cls(
            totals.train.steps,
            totals.gc,
            totals.sync_waits,
            totals.collect_calls,
            totals.script_collectives,
            totals.device_lag,
        )


def with_window_facts(evidence: RankEvidence, before: WindowEdge, now: Totals) -> RankEvidence:
    """Return a rank's evidence with what its totals show besides phases.

    Args:
        before: The window's beginning.
        now: The totals at its end.
    """
    steps = now.train.steps - before.steps
    if steps <= 0:
        return evidence
    called, collect_line = _since(before.collect_calls, now.collect_calls)
    own, own_line = _since(before.script_collectives, now.script_collectives)
    waited = evidence.phase_seconds.get(_WAIT, 0.0)
    starts = _epoch_start_seconds(now)
    lag = _minus(now.device_lag, before.device_lag)
    return replace(
        evidence,
        sync_line=_longest_wait(before.sync_waits, now.sync_waits),
        switches=now.switches,
        graph_limit_reached=bool(now.graph_limit),
        graph_limit_function=now.graph_limit,
        called_collection_seconds=min(called.ns / steps / 1e9, evidence.collected_seconds),
        collect_line=f"{PurePath(collect_line.file).name}:{collect_line.line}" if collect_line else "",
        script_collectives=own.calls / steps,
        script_collective_seconds=min(own.ns / steps / 1e9, waited),
        script_collective_line=own_line.words if own_line else "",
        epoch_start_seconds=min(starts, evidence.phase_seconds.get(_DATA, 0.0)),
        epoch_steps=now.train.steps / (now.epoch_starts.calls + 1) if now.epoch_starts.calls else 0.0,
        workers_respawn=now.loader is not None and now.loader.respawns_workers,
        device_lag_seconds=lag.ns / lag.calls / 1e9 if lag.calls > 0 else None,
    )


def _epoch_start_seconds(now: Totals) -> float:
    """Return the waits for first batches, spread over the steps of the whole run.

    A window has few of them, and by chance one more or less.
    """
    starts = now.epoch_starts
    return starts.ns / now.train.steps / 1e9 if starts.calls >= _MIN_STARTS else 0.0


def _since(before: Sequence[TimedLine], now: Sequence[TimedLine]) -> tuple[PhaseTotal, TimedLine | None]:
    """Return the calls of all lines since then, and the line with most time since then."""
    past = {line.place: line for line in before}
    added = [
        replace(line, calls=line.calls - old.calls, ns=line.ns - old.ns)
        if (old := past.get(line.place)) and line.ns >= old.ns and line.calls >= old.calls
        else line
        for line in now
    ]
    longest = max((line for line in added if line.ns), key=lambda line: line.ns, default=None)
    return PhaseTotal(sum(line.calls for line in added), sum(line.ns for line in added)), longest


def _minus(total: PhaseTotal, part: PhaseTotal) -> PhaseTotal:
    return PhaseTotal(max(0, total.calls - part.calls), max(0, total.ns - part.ns))


def _longest_wait(before: Sequence[SyncWait], now: Sequence[SyncWait]) -> str:
    """Return the line in which the host has waited longest for its device since then; empty for none."""
    past = {wait.place: wait.ns for wait in before}
    longest = max(now, key=lambda wait: wait.ns - past.get(wait.place, 0), default=None)
    return longest.words if longest else ""
