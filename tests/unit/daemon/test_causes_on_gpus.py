"""Verdicts on the loops of docs/gpu-results.md, with the figures that one H200 gave."""

from dataclasses import replace

import pytest

from torchperfd_daemon.diagnosis import Cause, RankEvidence, rank_causes

GPT = RankEvidence(
    0,
    "a",
    0.0332,
    {"data": 0.0001, "forward": 0.0270, "backward": 0.0047, "optimizer": 0.0014},
    {"forward": 0.0107, "backward": 0.0207, "optimizer": 0.0017, "other": 0.0001},
    on_device=True,
    device_busy=0.99,
    device_lag_seconds=0.06,
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
        device_lag_seconds=0.0003,
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
