"""Check the model of a step against jobs of an oracle that is written apart from it.

    python -m benchmarks.account --oracle JOBS.jsonl [--wrong]

Each job is fitted from its records alone. Then each of its faults is removed by an edit of the model, and the
gain compared with what the fault truly costs. What the model finds by itself is compared with the faults that
cost 5 % of the step or more. A slowness that all ranks have in all steps differs in no record from work that
takes as long: such faults are counted apart. Exits 1 when a bound is missed.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Final

from benchmarks.account.answers import MIN_SHARE, Found, find, without
from benchmarks.account.fitting import fit_steps
from benchmarks.account.jobs import OracleJob, Truth, read

from torchperfd_daemon.diagnosis.step_model import replay

WARM: Final = 24
"""Steps that fill the pipeline of a replay."""
WITHIN: Final = 0.03
MIN_RIGHT: Final = 0.95


class Score:
    """Counts of what is right."""

    def __init__(self) -> None:
        self.jobs = 0
        self.errors: list[float] = []
        self.costs: Counter[tuple[str, bool]] = Counter()
        self.named: Counter[tuple[str, bool]] = Counter()
        self.unseen = 0
        self.clean: Counter[bool] = Counter()
        self.wrong: list[str] = []

    def add(self, job: OracleJob) -> None:
        """Judge one job."""
        self.jobs += 1
        model = fit_steps(job.records, WARM, job.batches)
        step = replay(model).mean
        recorded = max(float(record.steps[WARM:].mean()) for record in job.records)
        self.errors.append(abs(step - recorded) / recorded)
        found = find(job, model)
        for truth in job.truth:
            gain = step - replay(without(truth, job)(model)).mean
            is_right = abs(gain * 1e3 - truth.cost_ms) <= WITHIN * job.step_ms
            self.costs[truth.kind, is_right] += 1
            if not is_right:
                self._note(job, truth, f"costs {truth.cost_ms:.2f} ms, model {gain * 1e3:.2f} ms")
            self._add_name(job, truth, found)
        if not job.truth:
            self.clean[not found] += 1
            if found:
                self.wrong.append(f"seed {job.seed}: no fault, found {found}")

    def _add_name(self, job: OracleJob, truth: Truth, found: list[Found]) -> None:
        if truth.cost_ms < MIN_SHARE * job.step_ms:
            return
        if not job.is_seen(truth):
            self.unseen += 1
            return
        rank = job.named_rank(truth)
        is_named = any(each.kind == truth.kind and each.rank == rank for each in found)
        self.named[truth.kind, is_named] += 1
        if not is_named:
            self._note(job, truth, f"costs {truth.cost_ms:.2f} ms, not named; found {found}")

    def _note(self, job: OracleJob, truth: Truth, words: str) -> None:
        rank = "all ranks" if truth.rank is None else f"rank {truth.rank}"
        self.wrong.append(
            f"seed {job.seed}: {truth.kind}, {rank}, {truth.phase}, step {job.step_ms:.2f} ms: {words}"
        )

    def report(self) -> bool:
        """Print the shares; return whether all bounds hold."""
        kinds = sorted({kind for kind, _ in self.costs})
        print(f"{'fault':14} {'cost within 3 %':>16} {'named':>12}")
        for kind in kinds:
            print(f"{kind:14} {_share(self.costs, kind):>16} {_share(self.named, kind):>12}")
        costs, named = _ratio(self.costs), _ratio(self.named)
        clean = self.clean[True] / max(1, self.clean.total())
        worst = sorted(self.errors)
        print(
            f"\n{self.jobs} jobs; the unedited replay is off by {worst[len(worst) // 2]:.2%} in the median,"
        )
        print(f"by {worst[-1]:.2%} at most")
        print(f"costs within {WITHIN:.0%} of the step      {costs:.1%}   >= {MIN_RIGHT:.0%}")
        print(f"culprits and kinds named        {named:.1%}   >= {MIN_RIGHT:.0%}")
        print(f"jobs without a fault or verdict {clean:.1%}   all of {self.clean.total()}")
        print(f"not in any record: {self.unseen} faults that all ranks have in all steps")
        return costs >= MIN_RIGHT and named >= MIN_RIGHT and clean == 1.0


def _share(counts: "Counter[tuple[str, bool]]", kind: str) -> str:
    right, total = counts[kind, True], counts[kind, True] + counts[kind, False]
    return f"{right} of {total}" if total else "-"


def _ratio(counts: "Counter[tuple[str, bool]]") -> float:
    right = sum(count for (_, is_right), count in counts.items() if is_right)
    return right / max(1, counts.total())


def main() -> int:
    """Read, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--oracle", type=Path, required=True, metavar="JOBS", help="jobs, one a line")
    parser.add_argument("--wrong", action="store_true", help="list what is wrong")
    options = parser.parse_args()
    score = Score()
    for job in read(options.oracle):
        score.add(job)
    holds = score.report()
    if options.wrong:
        print("\n".join(score.wrong))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
