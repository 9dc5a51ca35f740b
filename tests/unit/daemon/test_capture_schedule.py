"""The steps of a capture: ahead of every rank, as many as asked for, or an answer that says why not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd_daemon.captures.attempt import When, agree
from torchperfd_daemon.captures.rank_attempts import Ack
from torchperfd_daemon.errors import TorchperfdError

acks = st.dictionaries(
    st.integers(0, 100),
    st.builds(
        Ack, st.just(True), st.just(""), st.integers(0, 10**6), st.floats(0, 60).map(lambda s: round(s, 3))
    ),
    min_size=1,
    max_size=8,
)


@given(acks, st.integers(1, 1000), st.integers(0, 2 * 10**6))
def test_chosen_step_is_exact_or_refused_with_farthest_ranks(
    acks: dict[int, Ack], steps: int, at_step: int
) -> None:
    soonest, _ = agree(When(), acks, steps)
    assert soonest > max(ack.next_step for ack in acks.values())
    if at_step >= soonest:
        assert agree(When(at_step), acks, steps) == (at_step, at_step + steps)
        return
    with pytest.raises(TorchperfdError) as refused:
        agree(When(at_step), acks, steps)
    named = [
        f"step {at_step} is past or too near: rank {rank} is at step {ack.next_step};"
        f" ask for step {soonest} or a later one"
        for rank, ack in acks.items()
        if ack.next_step == max(each.next_step for each in acks.values())
    ]
    assert str(refused.value) in named


@given(acks, st.floats(0.001, 86_400))
def test_a_duration_is_the_nearest_number_of_mean_steps(acks: dict[int, Ack], seconds: float) -> None:
    means = [ack.step_seconds for ack in acks.values() if ack.step_seconds > 0]
    when = When(duration_seconds=seconds)
    if not means:
        with pytest.raises(TorchperfdError, match="the length of a step is unknown; use --steps"):
            agree(when, acks, 5)
        return
    mean = sum(means) / len(means)
    first, after = agree(when, acks, 5)
    made = after - first
    assert 1 <= made <= 1000
    if made < 1000:
        assert made == 1 or (made - 0.501) * mean <= seconds
        assert seconds <= (made + 0.501) * mean
    else:
        assert seconds >= 999 * mean


def test_ten_seconds_of_steps_of_a_fifth_are_fifty() -> None:
    reported = {0: Ack(True, "", 10, 0.3), 1: Ack(True, "", 12, 0.1), 2: Ack(True, "", 11, 0.0)}
    assert agree(When(duration_seconds=10), reported, 5) == (12 + 2 + 3, 12 + 2 + 3 + 50)


@pytest.mark.parametrize(("pause", "made"), [(0.0, 5), (0.1, 5), (0.3, 3), (0.9, 1)])
def test_short_pause_limits_the_steps(pause: float, made: int) -> None:
    acks = {0: Ack(True, "", 10, 0.1, 0.01), 1: Ack(True, "", 10, 0.1, pause)}
    first, after = agree(When(), acks, 5, 1.0)
    assert after - first == made
    assert agree(When(), acks, 5) == (first, first + 5)


def test_pause_of_one_step_too_long_is_refused() -> None:
    with pytest.raises(TorchperfdError, match=r"would pause for about 1.2 s when one step was captured"):
        agree(When(), {0: Ack(True, "", 10, 0.1, 1.2)}, 5, 1.0)
