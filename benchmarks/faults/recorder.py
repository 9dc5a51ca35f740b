"""A daemon that writes down what its diagnosis was given at each sample.

    python -m benchmarks.faults.recorder FILE serve …

The rest of the command line is that of ``torchperfd``. Recording belongs to the suite, so it replaces two
methods of the observer here, and the product has no hook for it. :mod:`benchmarks.faults.recordings` has the
format of the file, and reads it.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults.recordings import compact_line

from torchperfd_cli.main import main
from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.diagnosis.verdict import Verdict
from torchperfd_daemon.observer import run_watch
from torchperfd_daemon.observer.node_context import NodeContext
from torchperfd_daemon.observer.rank_watch import RankWatch
from torchperfd_daemon.observer.run_watch import RunWatch
from torchperfd_daemon.store.model import HISTORY_STEPS
from torchperfd_daemon.store.store import Rank
from torchperfd_daemon.worker_cost import THIS_MACHINE


class Recorder:
    """Appends a line for each sample from which causes are sought.

    Args:
        path: The file. Every line is flushed, so that a daemon that is killed has written its last.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._judged: Sequence[RankEvidence] = ()
        self._seen: dict[int, int] = {}
        self._wall = 0.0

    def install(self) -> None:
        """Replace the observer's methods."""
        sample, find, judge = RunWatch.sample, RunWatch._find_causes, vars(run_watch)["rank_causes"]

        def judging(run: str, ranks: Sequence[RankEvidence], *more: Any) -> list[Verdict]:
            self._judged = ranks
            found: list[Verdict] = judge(run, ranks, *more)
            return found

        def finding(watch: RunWatch, now: float) -> list[Verdict]:
            self._judged = ()
            found = find(watch, now)
            if self._judged:
                self._write(watch, now, found)
            return found

        def sampling(
            watch: RunWatch, ranks: Iterable[Rank], now: float, wall: float, context: NodeContext, gpu_of: Any
        ) -> bool:
            self._wall = wall
            return sample(watch, ranks, now, wall, context, gpu_of)

        vars(run_watch)["rank_causes"] = judging
        for name, method in (("_find_causes", finding), ("sample", sampling)):
            setattr(RunWatch, name, method)

    def _write(self, run: RunWatch, now: float, found: Sequence[Verdict]) -> None:
        speed = run._speed
        watches = {watch.rank.identity.rank: watch for watch in run._watches.values()}
        judged = [(watches[each.rank], each) for each in self._judged]
        line = {
            "unix": self._wall,
            "now": now,
            "since": speed.since,
            "slowdown": speed.slowdown,
            "period": speed.periodicity.period,
            "past_step_seconds": speed.periodicity.past_step_seconds,
            "cost": THIS_MACHINE.get(),
            "ranks": [self._rank(watch, each) for watch, each in judged],
            "found": [(each.cause.value, each.rank, each.cost_seconds_per_step) for each in found],
            "published": [(each.cause.value, each.rank, each.cost_seconds_per_step) for each in run.verdicts],
        }
        self._file.write(compact_line(line))

    def _rank(self, watch: RankWatch, evidence: RankEvidence) -> dict[str, Any]:
        rank = watch.rank
        fresh = rank.history.seen - self._seen.get(evidence.rank, 0)
        self._seen[evidence.rank] = rank.history.seen
        columns = rank.history.newest(min(fresh, HISTORY_STEPS))
        device = watch.device_work({})
        return {
            "evidence": evidence,
            "fills_window": watch.fills_window,
            "p95_seconds": rank.p95_step_seconds(),
            "window_steps": len(next(iter(watch.work({}).phase_seconds.values()), ())),
            "next_step": rank.next_step,
            "duration_ns": columns.duration_ns.tolist(),
            "phase_ns": {name: column.tolist() for name, column in columns.phases.items()},
            "device_phase_seconds": {
                name: column.tolist() for name, column in device.phase_seconds.items() if column.any()
            },
            "collections": watch.collections_in_regime(),
        }


if __name__ == "__main__":
    Recorder(Path(sys.argv[1])).install()
    main(sys.argv[2:])
