"""Runs for the live commands: four ranks in step, healthy or with one thing wrong, the same every time."""

import random
from array import array

from torchperfd.model.totals import GcTotals, PhaseTotals
from torchperfd_daemon.store.model import KindTotal, RankIdentity, State, StepColumns, Totals
from torchperfd_daemon.store.store import Store

RANKS = 4
STEPS = 64
NOW = 1_700_000_000.0
_MS = 1_000_000
_EXCHANGE_NS = 2 * _MS

# Milliseconds per step that are added: to which phase of which ranks.
CASES: dict[str, dict[str, dict[int, float]]] = {
    "healthy": {},
    "one straggler": {"forward": {2: 20.0}},
    "input-bound": {"data": dict.fromkeys(range(RANKS), 60.0)},
}
_USUAL = {"data": 1.0, "forward": 12.0, "backward": 25.0, "optimizer": 3.0, "other": 1.0}


def train(
    store: Store, case: str, run: str = "bert-17", *, measure_waits: bool = True, node: str = "node-{}"
) -> None:
    """Make the ranks of a run join, with their newest steps; two on each ``node``, a and b.

    Without ``measure_waits`` the waits in collectives are not known, as without hooks on them.
    """
    chance = random.Random(7)
    own = [
        [
            {
                name: int(_MS * (usual + CASES[case].get(name, {}).get(rank, 0.0)) * chance.gauss(1, 0.01))
                for name, usual in _USUAL.items()
            }
            for _ in range(STEPS)
        ]
        for rank in range(RANKS)
    ]
    slowest = [max(sum(ranks[step].values()) for ranks in own) for step in range(STEPS)]
    for rank, steps in enumerate(own):
        for phases, longest in zip(steps, slowest, strict=True):
            phases["collective_wait"] = longest - sum(phases.values()) + _EXCHANGE_NS
        durations = array("q", [sum(phases.values()) for phases in steps])
        ends = array("q", [int(NOW * 1e9) - sum(durations[step + 1 :]) for step in range(STEPS)])
        columns = {
            name: array("q", [phases[name] for phases in steps])
            for name in steps[0]
            if measure_waits or name != "collective_wait"
        }
        record = store.join(
            RankIdentity(
                run, rank, RANKS, rank, job_name="bert", node=node.format("ab"[rank // 2]), pid=400 + rank
            )
        )
        store.add_steps(record, StepColumns(ends, durations, columns))
        record.state = State.TRAINING
        record.totals = Totals(
            train=KindTotal(
                1000,
                1000 * durations[0],
                phases={name: PhaseTotals(1000, 1000 * ns[0]) for name, ns in columns.items()},
            ),
            gc=(GcTotals(2000, 2000 * _MS // 10), GcTotals(0, 0), GcTotals(10, 300 * _MS)),
        )
