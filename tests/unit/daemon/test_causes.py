"""Causes: each is found from its evidence, with its rank and its cost; what has none is unknown."""

import shlex
from dataclasses import replace

import pytest
from tests.support.golden import check_golden
from tests.unit.daemon.rank_evidence import (
    STEP,
    Containing,
    Expected,
    all_changed,
    changed,
    eight,
    late,
    later,
    rank,
    ranks,
    seen,
    since,
    with_odd,
)

from torchperfd.model.loader_facts import LoaderFacts
from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.diagnosis.verdict import Cause
from torchperfd_daemon.diagnosis.verdicts import rank_causes


def synchronised(of: RankEvidence, seconds: float, busy: float | None) -> RankEvidence:
    """Return the rank with its host waiting for the device, which is busy for this part of the step."""
    line = f"item() at train.py:{50 + of.rank}"
    return replace(of, sync_seconds=seconds, sync_line=line, device_busy=busy)


def updating(seconds: float, batch_size: int = 8) -> RankEvidence:
    """Return the only rank of a run on the CPU, whose optimizer takes so long for each small batch."""
    loader = LoaderFacts(cpus=2.0, batch_size=batch_size)
    phases = {"optimizer": seconds, "collective_wait": 0.0}
    return replace(changed(rank(0), **phases), device_busy=None, loader=loader)


CASES: dict[Cause, list[RankEvidence]] = {
    Cause.INPUT_BOUND: eight(late(5, "data", 0.04)),
    Cause.HOST_BOUND: ranks(device_busy=0.3),
    Cause.SYNCHRONISATION: [synchronised(each, 0.06, busy=0.65) for each in ranks()],
    Cause.SLOW_RANK: eight(late(3, "forward", 0.03)),
    Cause.GARBAGE_COLLECTION: eight(late(2, "backward", 0.04, collected_seconds=0.04)),
    Cause.CPU_CONTENTION: eight(late(1, "forward", 0.04, queued_seconds=0.04)),
    Cause.CGROUP_THROTTLING: eight(late(6, "forward", 0.04, queued_seconds=0.041, throttled_seconds=0.04)),
    Cause.SLOW_IO: eight(late(7, "data", 0.04, disk_seconds=0.038)),
    Cause.GPU_THROTTLING: eight(
        late(4, "backward", 0.04, device_busy=0.9, device_throttled=1.0, device_slowdown=0.32)
    ),
    Cause.GPU_SHARED: eight(late(0, "backward", 0.04, device_busy=0.9, device_shared=0.3)),
    Cause.COLLECTIVE: all_changed(ranks(), collective_wait=0.05),
    Cause.PIPELINE_IMBALANCE: [
        replace(each, stage=each.rank // 4)
        for each in eight(*(changed(rank(number), forward=0.07) for number in range(4, 8)))
    ],
    Cause.CHECKPOINT: ranks(checkpoint_seconds=0.02),
    Cause.RECOMPILATION: eight(late(2, "forward", 0.04, compiled_seconds=0.04)),
    Cause.MEMORY_PRESSURE: ranks(reclaim_seconds=0.04),
    Cause.SCRIPT_CODE: [replace(changed(rank(0), other=0.04), device_busy=None)],
    Cause.UNKNOWN: all_changed(ranks(), optimizer=0.04),
    Cause.NONE: ranks(),
}
ALIKE = {Cause.HOST_BOUND, Cause.SYNCHRONISATION, Cause.COLLECTIVE, Cause.CHECKPOINT, Cause.MEMORY_PRESSURE}


@pytest.mark.parametrize("cause", CASES, ids=lambda cause: cause.value)
def test_each_cause_comes_first_where_it_is_the_cause(cause: Cause) -> None:
    first = rank_causes("bert-17", CASES[cause])[0]
    assert first.cause is cause
    if cause in ALIKE:
        assert first.rank is None


def test_the_words_are_the_golden_file() -> None:
    lines = []
    for cause, evidence in CASES.items():
        lines.append(f"# {cause.value}")
        for verdict in rank_causes("bert-17", evidence):
            cost = f"{verdict.cost_seconds_per_step * 1e3:.1f} ms"
            lines.append(f"{verdict.summary} | {verdict.phase or '-'} | {cost} | {verdict.next_command}")
    text = "\n".join(lines) + "\n"
    check_golden("causes.txt", text)


@pytest.mark.parametrize(
    ("cause", "number", "cost"),
    [
        (Cause.INPUT_BOUND, 5, 0.04),
        (Cause.SLOW_RANK, 3, 0.03),
        (Cause.GARBAGE_COLLECTION, 2, 0.04),
        (Cause.CGROUP_THROTTLING, 6, 0.04),
    ],
)
def test_the_odd_rank_is_named_with_its_cost(cause: Cause, number: int, cost: float) -> None:
    found = rank_causes("r", CASES[cause])
    assert seen(found) == [Expected(cause, number, cost)]
    assert found[0].node == f"node-{number // 4}"


LATE_HOST = replace(rank(0), on_device=True)
STALLED_HOST = replace(changed(LATE_HOST, other=0.04), collected_seconds=0.045)
STARVED = ranks(queued_seconds=0.2 * STEP, device_busy=None)
EXCHANGING = [changed(each, collective_wait=0.05) for each in ranks()]
TWICE = [
    since(each, changed(each, **{name: 2 * seconds for name, seconds in each.phase_seconds.items()}))
    for each in EXCHANGING
]
GROWS = {"grows_by": 5e7, "grows_for_seconds": 10, "full_in_seconds": 60}
WAITING_THREADS = ranks(exchange_queued_seconds=0.06)

FOUND: dict[str, tuple[list[RankEvidence], list[Expected]]] = {
    "short waits that the host sees are healthy": (
        [changed(each, collective_wait=0.0005) for each in ranks()],
        [Expected(Cause.NONE)],
    ),
    # Of 35 ms idle, 2 are a wait for other ranks.
    "synchronisation costs the idle time after it": (
        CASES[Cause.SYNCHRONISATION],
        [Expected(Cause.SYNCHRONISATION, cost=0.033, evidence=Containing("in item() at train.py:50"))],
    ),
    "synchronisation costs no more than it takes": (
        [synchronised(rank(0), 0.02, busy=0.65)],
        [Expected(Cause.SYNCHRONISATION, cost=0.02)],
    ),
    "synchronisation with a busy device is no cause": (
        [synchronised(each, 0.06, 0.95) for each in ranks(4)],
        [Expected(Cause.NONE)],
    ),
    "synchronisation with a device of unknown use is no cause": (
        [synchronised(each, 0.06, None) for each in ranks(4)],
        [Expected(Cause.NONE)],
    ),
    "synchronisation costs no time of the loader": (
        [synchronised(changed(each, data=0.052), 0.06, busy=0.6) for each in ranks(4)],
        [Expected(Cause.INPUT_BOUND, cost=0.052)],
    ),
    "synchronisation costs no bubble of a pipeline": (
        [synchronised(changed(each, collective_wait=0.04), 0.08, 0.7) for each in ranks(4)],
        [Expected(Cause.NONE)],
    ),
    "synchronisation that is new costs the growth": (
        [
            since(synchronised(each, 0.01, 0.97), synchronised(changed(each, other=0.03), 0.06, 0.74))
            for each in ranks(4)
        ],
        [Expected(Cause.SYNCHRONISATION, cost=0.03, has_grown=True)],
    ),
    "synchronisation of one rank costs its lateness": (
        eight(synchronised(late(3, "optimizer", 0.04), 0.06, busy=0.7)),
        [Expected(Cause.SYNCHRONISATION, 3, 0.04)],
    ),
    # A device has work queued, and notices only what is left of a delay once that is done.
    "a new delay of the host costs what steps have grown by": (
        [since(LATE_HOST, STALLED_HOST)],
        [Expected(Cause.GARBAGE_COLLECTION, cost=0.04)],
    ),
    "a new delay without a device costs all of it": (
        [since(replace(LATE_HOST, on_device=False), replace(STALLED_HOST, on_device=False))],
        [Expected(Cause.GARBAGE_COLLECTION, cost=0.045)],
    ),
    "two causes are ordered by cost": (
        [replace(changed(each, data=0.05), collected_seconds=0.02) for each in ranks(4)],
        [Expected(Cause.INPUT_BOUND), Expected(Cause.GARBAGE_COLLECTION)],
    ),
    "a cause costs what it takes beyond the past": (
        [
            since(each, replace(changed(each, backward=0.098), collected_seconds=0.05))
            for each in ranks(collected_seconds=0.01)
        ],
        [Expected(Cause.GARBAGE_COLLECTION, None, 0.04)],
    ),
    # What it has more than the others, at most what it is late.
    "the loss of one rank is its excess, limited by its lateness": (
        [*ranks(7, queued_seconds=0.01), late(7, "forward", 0.03, queued_seconds=0.05)],
        [Expected(Cause.CPU_CONTENTION, 7, 0.03)],
    ),
    "one rank that is not late costs the run nothing": (
        [*ranks(7), replace(rank(7), queued_seconds=0.05)],
        [Expected(Cause.NONE)],
    ),
    "an exchange that always took so long is none": (EXCHANGING, [Expected(Cause.NONE)]),
    "exchanges that grow with all work are no cause": (TWICE, [Expected(Cause.UNKNOWN)]),
    # Ranks that compute so much more wait for processors because of that.
    "nor are the waits for processors that grow with it": (
        [replace(each, queued_seconds=0.02) for each in TWICE],
        [Expected(Cause.UNKNOWN)],
    ),
    # Of 98 ms of its own 20 in the queue; of 158 ms then 32.
    "a rank with more work waits for processors without contention": (
        with_odd(
            later(replace(rank(2), queued_seconds=0.02), "forward", 0.06, queued_seconds=0.032),
            all_changed(ranks(queued_seconds=0.02), collective_wait=0.062),
        ),
        [Expected(Cause.SLOW_RANK, 2, 0.06)],
    ),
    # Without an onset, a loss that all ranks have is reported from a larger share on.
    "a lasting loss of all ranks is none": (STARVED, [Expected(Cause.NONE)]),
    "a lasting loss of all ranks with a large share is a cause": (
        [replace(each, queued_seconds=0.4 * STEP) for each in STARVED],
        [Expected(Cause.CPU_CONTENTION)],
    ),
    "a loss of all ranks that is new is a cause": (
        [since(rank(number), each) for number, each in enumerate(STARVED)],
        [Expected(Cause.CPU_CONTENTION)],
    ),
    "lateness not explained by a cause is the rank's own": (
        eight(late(2, "forward", 0.05, collected_seconds=0.03)),
        [Expected(Cause.GARBAGE_COLLECTION, 2, 0.03), Expected(Cause.SLOW_RANK, 2, 0.02)],
    ),
    "garbage collection is blamed before contention": (
        eight(late(2, "backward", 0.04, collected_seconds=0.04, queued_seconds=0.01)),
        [Expected(Cause.GARBAGE_COLLECTION, 2, 0.04)],
    ),
    "a rank late by its checkpoints has slow checkpoints": (
        eight(later(changed(rank(0), checkpoint=0.0), "checkpoint", 0.02)),
        [Expected(Cause.CHECKPOINT, 0, phase="checkpoint")],
    ),
    "a loader that mostly waits for storage has no other cause": (
        eight(late(7, "data", 0.04, disk_seconds=0.03)),
        [Expected(Cause.SLOW_IO, 7, 0.04)],
    ),
    "a loader that partly waits for storage has two": (
        eight(late(7, "data", 0.04, disk_seconds=0.01)),
        [Expected(Cause.INPUT_BOUND, 7), Expected(Cause.SLOW_IO, 7)],
    ),
    "threads of collectives that wait for processors name their rank": (
        with_odd(
            replace(changed(rank(5), collective_wait=0.032), exchange_queued_seconds=0.028),
            all_changed(ranks(), collective_wait=0.032),
        ),
        # All that steps have grown by.
        [Expected(Cause.CPU_CONTENTION, 5, 0.03)],
    ),
    "threads that always waited are no cause": (WAITING_THREADS, [Expected(Cause.NONE)]),
    "threads that have waited before are no cause": (
        [since(each, each) for each in WAITING_THREADS],
        [Expected(Cause.NONE)],
    ),
    "compilations that are most of the lateness explain all of it": (
        eight(late(3, "forward", 0.04, compiled_seconds=0.031)),
        [Expected(Cause.RECOMPILATION, 3, 0.04)],
    ),
    "compilations that are less explain themselves": (
        eight(late(3, "forward", 0.04, compiled_seconds=0.029)),
        [Expected(Cause.RECOMPILATION, 3, 0.029), Expected(Cause.SLOW_RANK, 3)],
    ),
    "a quota costs what it holds the exchange up for as well": (
        with_odd(
            changed(late(3, "forward", 0.04, throttled_seconds=0.08), collective_wait=0.022),
            all_changed(ranks(), collective_wait=0.062),
        ),
        [Expected(Cause.CGROUP_THROTTLING, 3, 0.06)],
    ),
    # What a cause has always cost is not taken out of what has grown.
    "the past cost of a cause is not deducted from growth": (
        all_changed(ranks(queued_seconds=0.01), data=0.052),
        [Expected(Cause.INPUT_BOUND, None, 0.05)],
    ),
    # Without what it lacks, a rank is as fast as the others, which lack some of it as well.
    "the loss of a rank costs what the others wait": (
        with_odd(
            late(3, "forward", 0.02, queued_seconds=0.02),
            [
                since(
                    each, changed(replace(each, queued_seconds=0.006), forward=0.036, collective_wait=0.036)
                )
                for each in ranks()
            ],
        ),
        [Expected(Cause.CPU_CONTENTION, 3, 0.014)],
    ),
    "an unexplained late rank is late by its growth": (
        eight(late(5, "optimizer", 0.02, **GROWS)),
        [Expected(Cause.MEMORY_PRESSURE, 5, 0.02)],
    ),
    "a late loader is not late by its growth": (
        eight(late(5, "data", 0.02, **GROWS)),
        [Expected(Cause.INPUT_BOUND), Expected(Cause.MEMORY_PRESSURE)],
    ),
    # Only what falls into phases that compute is measured.
    "a held interpreter costs all of a rank's lateness": (
        eight(late(1, "forward", 0.04, blocked_seconds=0.033)),
        [Expected(Cause.INTERPRETER_LOCK, 1, pytest.approx(0.04, rel=0.05))],
    ),
    # The optimizer has 80 of 170 ms; a batch of twice the size would save half of that for a sample.
    "a small batch costs half of its optimizer": (
        [updating(0.08)],
        [Expected(Cause.SMALL_BATCHES, None, 0.04, "optimizer", False)],
    ),
    "a larger batch is no small one": ([updating(0.08, batch_size=9)], [Expected(Cause.NONE)]),
    "a small batch that costs less than a fifth is none": ([updating(0.059)], [Expected(Cause.NONE)]),
    "nothing seen is unknown": ([], [Expected(Cause.UNKNOWN)]),
    "no step seen is unknown": ([RankEvidence(0, "n", 0.0)], [Expected(Cause.UNKNOWN)]),
}


@pytest.mark.parametrize(("evidence", "expected"), FOUND.values(), ids=FOUND)
def test_rank_causes_of_evidence(evidence: list[RankEvidence], expected: list[Expected]) -> None:
    assert seen(rank_causes("r", evidence)) == expected


def test_next_command_with_any_run_name_is_safe_in_a_shell() -> None:
    (verdict,) = rank_causes("bert 17; reboot", CASES[Cause.SLOW_RANK])
    words = ["torchperfd", "capture", "--run", "bert 17; reboot", "--steps", "5"]
    assert shlex.split(verdict.next_command) == words
