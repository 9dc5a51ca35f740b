"""Causes on busy nodes, and on the loops that one H200 was measured with."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.values import some

from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.diagnosis.verdicts import rank_causes


def alone(queued: float, collected: float = 0.0, **phases: float) -> RankEvidence:
    """Return the only rank of a run on the CPU; times are in milliseconds."""
    seconds = {name: ms / 1e3 for name, ms in phases.items()}
    step = sum(seconds.values())
    return RankEvidence(0, "n", step, seconds, queued_seconds=queued / 1e3, collected_seconds=collected / 1e3)


def shares(found: list[Verdict], step_seconds: float) -> dict[Cause, float]:
    return {each.cause: each.cost_seconds_per_step / step_seconds for each in found}


READS_ALL = alone(queued=564, collected=278, data=734, forward=10, backward=20, optimizer=5, other=4)
"""Parses a whole file for each sample, beside many other programs."""


def test_rank_causes_own_causes_come_before_a_busy_node() -> None:
    found = rank_causes("r", [READS_ALL])
    assert [each.cause for each in found] == [Cause.INPUT_BOUND, Cause.GARBAGE_COLLECTION]
    share = shares(found, READS_ALL.step_seconds)
    assert share[Cause.GARBAGE_COLLECTION] == pytest.approx(0.36, abs=0.01)
    assert found[0].note.startswith("busy node: everything takes 3.7 times as long")
    assert not found[1].note


@pytest.mark.parametrize("queued", [0.3, 0.6, 0.9, 0.95])
def test_rank_causes_code_costs_all_of_its_phase(queued: float) -> None:
    """The wait for a processor that a phase causes comes back with the phase."""
    phases = {"data": 210.0, "forward": 110.0, "backward": 340.0, "other": 340.0}
    found = rank_causes("r", [alone(queued * 1000, **phases)])
    share = shares(found, 1.0)
    assert share == {Cause.SCRIPT_CODE: pytest.approx(0.34), Cause.INPUT_BOUND: pytest.approx(0.21)}
    assert f"{1 / (1 - queued):.1f} times as long" in found[0].note


def test_rank_causes_small_phases_stay_out_beside_contention() -> None:
    only = alone(queued=70, data=15, forward=30, backward=40, other=15)
    assert [each.cause for each in rank_causes("r", [only])] == [Cause.CPU_CONTENTION]


def two(work: float, queued: tuple[float, float], exchange: float = 4.0) -> list[RankEvidence]:
    """Return two ranks, of which rank 0 works for so long, rank 1 for 5 ms; both wait for processors."""
    does = work + queued[0], 5.0 + queued[1]
    step = max(does) + exchange
    made = []
    for number in (0, 1):
        phases = {"forward": does[number] / 1e3, "collective_wait": (step - does[number]) / 1e3}
        late = max(0.0, does[number] - does[1 - number]) / 1e3
        made.append(
            RankEvidence(
                number,
                "n",
                step / 1e3,
                phases,
                queued_seconds=queued[number] / 1e3,
                late_seconds=late if late >= 0.05 * step / 1e3 else 0.0,
                late_phase="forward" if late else "",
            )
        )
    return made


def test_rank_causes_slow_rank_keeps_the_wait_of_its_work() -> None:
    """As measured on a busy node: without its additional work, the rank would not be late."""
    phases = {"data": 0.0025, "forward": 0.0203, "backward": 0.0109, "collective_wait": 0.0137}
    slow = RankEvidence(0, "n", 0.0474, phases, queued_seconds=0.0275)
    slow = replace(slow, late_seconds=0.0129, late_phase="forward")
    phases = {"data": 0.0019, "forward": 0.0046, "backward": 0.0144, "collective_wait": 0.0265}
    quick = RankEvidence(1, "n", 0.0474, phases, queued_seconds=0.0195)
    (only,) = rank_causes("r", [slow, quick])
    assert (only.cause, only.rank, only.phase) == (Cause.SLOW_RANK, 0, "forward")
    assert only.cost_seconds_per_step == pytest.approx(0.0128, abs=1e-4)
    assert "busy node" in only.note


def test_rank_causes_late_rank_that_waits_more_is_contention() -> None:
    """The same work, but most of the wait: no work of its own makes the rank late."""
    (verdict,) = rank_causes("r", two(5.0, (15.0, 1.0)))
    assert (verdict.cause, verdict.rank) == (Cause.CPU_CONTENTION, 0)
    assert verdict.cost_seconds_per_step == pytest.approx(0.014)


def test_rank_causes_wait_that_differs_is_no_slow_rank() -> None:
    (verdict,) = rank_causes("r", two(5.0, (15.0, 10.0)))
    assert (verdict.cause, verdict.rank) == (Cause.CPU_CONTENTION, None)
    assert verdict.cost_seconds_per_step == pytest.approx(0.015)


def test_rank_causes_new_load_on_all_ranks_names_none() -> None:
    """The rank with more work waits longer once others take the processors."""
    pasts = [replace(each, late_seconds=0.0) for each in two(15.0, (0.0, 0.0))]
    now = [
        replace(each, before=past, late_seconds=0.01 if each.rank == 0 else 0.0)
        for each, past in zip(two(15.0, (15.0, 5.0)), pasts, strict=True)
    ]
    (verdict,) = rank_causes("r", now)
    assert (verdict.cause, verdict.rank, verdict.has_grown) == (Cause.CPU_CONTENTION, None, True)


@pytest.mark.parametrize("queued", [90.0, 180.0])
def test_rank_causes_old_code_stays_beside_new_contention(queued: float) -> None:
    """Contention that has come with a slowdown is its cause; the code costs what its phase takes."""
    past = alone(queued=80, forward=69, other=31)
    step = 100 + queued - 80
    now = replace(alone(queued=queued, forward=0.69 * step, other=0.31 * step), before=past)
    found = shares(rank_causes("r", [now]), now.step_seconds)
    assert found[Cause.CPU_CONTENTION] == pytest.approx(1 - 100 / step)
    assert found[Cause.SCRIPT_CODE] == pytest.approx(0.31, abs=0.01)


milliseconds = st.floats(0, 1000)


@given(
    st.lists(
        st.builds(
            alone,
            queued=milliseconds,
            collected=milliseconds,
            data=milliseconds,
            forward=st.floats(1, 1000),
            other=milliseconds,
            collective_wait=milliseconds,
        ),
        min_size=1,
        max_size=3,
    ),
    milliseconds,
    st.booleans(),
)
def test_rank_causes_account_sums_to_the_step(
    ranks: list[RankEvidence], lost: float, is_slower: bool
) -> None:
    seen = [
        replace(
            each,
            rank=number,
            late_seconds=min(lost / 1e3, each.own_seconds) if number == 0 else 0.0,
            reclaim_seconds=lost / 1e3,
            compiled_seconds=lost / 2e3,
            before=alone(0, data=1, forward=1) if is_slower else None,
        )
        for number, each in enumerate(ranks)
    ]
    found = rank_causes("r", seen)
    longest = max(each.step_seconds for each in seen)
    assert all(0 <= each.cost_seconds_per_step <= longest * (1 + 1e-9) for each in found)
    account = some(found[0].account)
    assert sum(part.seconds for part in account.parts) == pytest.approx(account.step_seconds, rel=1e-3)
    assert all(part.seconds >= 0 for part in (*account.parts, *account.hidden))


GPT = RankEvidence(
    0,
    "a",
    0.0332,
    {"data": 0.0001, "forward": 0.0270, "backward": 0.0047, "optimizer": 0.0014},
    {"forward": 0.0107, "backward": 0.0207, "optimizer": 0.0017, "other": 0.0001},
    on_device=True,
    device_busy=0.99,
)
"""A GPT of 12 layers that keeps its device busy: the host waits until it may launch more."""


def hidden_loader() -> RankEvidence:
    """Return the loop whose loader takes 8 ms of the host's time, in which the device computes."""
    phases = {**GPT.phase_seconds, "data": 0.0083, "forward": 0.0188}
    return replace(GPT, phase_seconds=phases)


def norms_read() -> RankEvidence:
    """Return the loop since it has read the norm of each gradient: the device idles after each reading."""
    now = replace(
        GPT,
        step_seconds=0.0413,
        phase_seconds={**GPT.phase_seconds, "forward": 0.0055, "other": 0.0296},
        device_phase_seconds={**GPT.device_phase_seconds, "other": 0.0082},
        device_busy=0.8,
        sync_seconds=0.0275,
        sync_line="item() at train.py:57",
    )
    return replace(now, before=GPT)


def small_resnet() -> RankEvidence:
    """Return a ResNet-18 on 8 small images: its kernels are shorter than their launches."""
    return RankEvidence(
        0,
        "a",
        0.0095,
        {"data": 0.0001, "forward": 0.0032, "loss": 0.0002, "backward": 0.0043, "optimizer": 0.0016}
        | {"zero_grad": 0.0001},
        {"forward": 0.0033, "backward": 0.0043, "optimizer": 0.0016, "other": 0.0003},
        on_device=True,
        device_busy=0.3,
        sync_seconds=0.0001,
    )


@pytest.mark.parametrize(
    ("rank", "cause", "cost"),
    [
        (GPT, Cause.NONE, 0.0),
        (hidden_loader(), Cause.NONE, 0.0),
        (norms_read(), Cause.SYNCHRONISATION, 0.0081),
        (small_resnet(), Cause.HOST_BOUND, None),
    ],
    ids=["busy device", "loader behind the device", "norms are read", "tiny kernels"],
)
def test_cause_on_a_gpu_is_what_bounds_the_step(rank: RankEvidence, cause: Cause, cost: float | None) -> None:
    first = rank_causes("r", [rank])[0]
    assert first.cause is cause, first.evidence
    if cost is not None:
        assert first.cost_seconds_per_step == pytest.approx(cost, rel=0.1)
    if cause is Cause.SYNCHRONISATION:
        assert "train.py:57" in first.evidence
