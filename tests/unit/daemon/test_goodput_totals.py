"""The goodput totals of a rank: sums stay exact for any report, and each second is in its bucket."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd_daemon.goodput.store import packed
from torchperfd_daemon.goodput.totals import Bucket, Claims, GoodputTotals
from torchperfd_daemon.store.model import State

S = 1_000_000_000
T = 1_700_000_000 * S


class Process:
    """A training process that reports its states and claims to goodput totals, in whole seconds."""

    def __init__(self, goodput: GoodputTotals, now: int) -> None:
        self.goodput = goodput
        self.now = now
        self.claims = Claims()
        self.ended = 0

    def lives(self, seconds: int, state: State, *, excused: bool = False) -> None:
        """Let seconds pass in which it reports only its state."""
        for _ in range(seconds):
            self.now += S
            self.goodput.watch(self.now, state, excused=excused)

    def works(self, seconds: int, *, steps: int = 1, idle: int = 0, **waits: int) -> None:
        """Make steps in so many seconds after idle ones; parts are waits, the rest is productive."""
        self.now += (idle + seconds) * S
        self.claim(seconds, steps, **waits)
        self.ended = self.now
        self.report()

    def claim(self, seconds: int, steps: int = 0, **waits: int) -> None:
        """Add to what it will report."""
        known = self.claims
        amounts = {**waits, "productive": seconds - sum(waits.values())}
        self.claims = replace(
            known,
            loop=known.loop or self.now - seconds * S,
            steps=known.steps + steps,
            step_ns=known.step_ns + (seconds * S if steps else 0),
            warmup_ns=known.warmup_ns or seconds * S,
            **{name: getattr(known, name) + amount * S for name, amount in amounts.items()},
        )

    def report(self) -> None:
        """Tell all that was done."""
        self.goodput.add_claims(self.now, self.claims, self.claims.loop, self.ended)
        self.goodput.watch(self.now, State.TRAINING)


def started(process: str = "a") -> Process:
    """A first process that has taken five seconds to start, and one for a first step."""
    one = Process(GoodputTotals.begin(process, T), T)
    one.lives(5, State.STARTING)
    one.works(1)
    return one


def seconds(goodput: GoodputTotals) -> dict[str, float]:
    """Return the buckets that are not empty, which must sum to the time covered."""
    assert sum(goodput.buckets().values()) == goodput.until_ns - goodput.first_ns
    return {bucket.value: ns / S for bucket, ns in goodput.buckets().items() if ns}


def test_what_a_process_claims_goes_where_it_says() -> None:
    one = started()
    one.works(10, steps=5, data_wait=2, communication_wait=3, checkpoint=1)
    one.claim(4, validation=4)
    one.now += 4 * S
    one.report()
    assert seconds(one.goodput) == {
        "start_up": 5,
        "productive": 5,
        "data_wait": 2,
        "communication_wait": 3,
        "checkpoint": 1,
        "validation": 4,
    }


def test_time_between_steps_is_work_until_the_stall_limit() -> None:
    one = started()
    one.works(1, idle=9)
    one.works(1, idle=11)
    assert seconds(one.goodput) == {"start_up": 5, "productive": 12, "stall": 11}


def test_open_time_belongs_to_what_the_rank_does_now() -> None:
    for state, bucket in (
        (State.VALIDATING, "validation"),
        (State.CHECKPOINTING, "checkpoint"),
        (State.FINISHED, "shutdown"),
    ):
        one = started()
        one.lives(60, state)
        assert seconds(one.goodput) == {"start_up": 5, "productive": 1, bucket: 60}
        one.goodput.end(one.now + S)
        assert seconds(one.goodput) == {"start_up": 5, "productive": 1, bucket: 61}


def test_a_save_that_is_reported_with_the_next_steps_is_no_stall() -> None:
    one = started()
    one.lives(60, State.CHECKPOINTING)
    one.lives(1, State.TRAINING)
    one.now += S
    one.claim(60, checkpoint=60)
    one.claim(2, 2)
    one.ended = one.now
    one.report()
    assert seconds(one.goodput) == {"start_up": 5, "productive": 3, "checkpoint": 60}


def test_hang_that_ends_stays_counted_as_a_stall() -> None:
    """A hang is a stall while it lasts, and stays one when its step ends after all."""
    one = started()
    one.lives(10, State.TRAINING)
    assert "stall" not in seconds(one.goodput)
    one.lives(20, State.TRAINING)
    assert seconds(one.goodput) == {"start_up": 5, "productive": 1, "stall": 30}
    one.claim(31, 1, communication_wait=30)
    one.now += S
    one.ended = one.now
    one.report()
    assert seconds(one.goodput) == {"start_up": 5, "productive": 2, "stall": 30}
    one.works(2, steps=2)
    assert seconds(one.goodput) == {"start_up": 5, "productive": 4, "stall": 30}
    # What hung is not taken for usual.
    assert one.goodput.limit_ns == 10 * S


def test_a_rank_that_hung_and_was_killed_had_stalled() -> None:
    one = started()
    one.lives(30, State.TRAINING)
    one.goodput.end(one.now + S)
    assert seconds(one.goodput) == {"start_up": 5, "productive": 1, "stall": 31}


def test_long_steps_are_no_stalls() -> None:
    one = started()
    for _ in range(3):
        one.works(10)
    one.lives(79, State.TRAINING)
    assert "stall" not in seconds(one.goodput)
    one.lives(2, State.TRAINING)
    assert seconds(one.goodput)["stall"] == 81


def test_ranks_that_wait_for_one_that_saves_do_not_stall() -> None:
    one = started()
    one.lives(60, State.TRAINING, excused=True)
    one.lives(5, State.TRAINING)
    assert "stall" not in seconds(one.goodput)
    one.lives(10, State.TRAINING)
    assert seconds(one.goodput)["stall"] == 75


def test_a_hang_after_a_save_does_not_take_the_save() -> None:
    one = started()
    one.lives(60, State.CHECKPOINTING)
    one.lives(12, State.TRAINING)
    assert seconds(one.goodput) == {"start_up": 5, "productive": 1, "checkpoint": 61, "stall": 11}


def test_the_time_to_the_next_process_is_the_restart_gap() -> None:
    one = started()
    one.lives(1, State.TRAINING)
    one.goodput.end(one.now)
    two = Process(one.goodput, one.now + 20 * S)
    two.goodput.start("b", two.now, two.now + 3 * S)
    two.lives(4, State.STARTING)
    two.works(2)
    assert seconds(two.goodput) == {"start_up": 9, "productive": 4, "restart_gap": 20}
    assert two.goodput.starts == 2


def test_process_with_unseen_end_lived_until_its_last_report() -> None:
    one = started()
    one.lives(3, State.TRAINING)
    one.goodput.start("b", one.now + 7 * S, one.now + 9 * S)
    assert seconds(one.goodput) == {"start_up": 5, "productive": 4, "restart_gap": 7}


def test_process_started_before_the_last_ended_leaves_no_gap() -> None:
    one = started()
    one.goodput.start("b", T, one.now)
    two = Process(one.goodput, one.now)
    two.lives(2, State.STARTING)
    assert seconds(two.goodput) == {"start_up": 7, "productive": 1}


def test_restarted_daemon_gets_all_of_it_afterwards() -> None:
    one = started()
    one.works(2, steps=2)
    restored = msgspec.json.decode(packed(one.goodput), type=GoodputTotals)
    assert restored == one.goodput
    one.goodput = restored
    one.claim(100, 100, data_wait=40)
    one.now += 100 * S
    one.ended = one.now
    restored.start("a", T, one.now)
    restored.watch(one.now, State.STARTING)
    one.report()
    assert seconds(restored) == {"start_up": 5, "productive": 63, "data_wait": 40}
    assert restored.starts == 1


def test_a_second_loop_of_one_process_starts_up_again() -> None:
    one = started()
    one.lives(3, State.FINISHED)
    again = Process(one.goodput, one.now + S)
    again.works(2)
    assert seconds(one.goodput) == {"start_up": 9, "productive": 3}


@pytest.mark.parametrize("off_s", [-3600, 3600])
def test_reports_of_a_clock_that_was_set_leave_the_sums_true(off_s: int) -> None:
    one = started()
    goodput = one.goodput
    one.claim(5, 5, data_wait=2)
    one.now += 5 * S
    goodput.add_claims(one.now, one.claims, one.claims.loop, one.now + off_s * S)
    goodput.watch(one.now, State.TRAINING)
    assert seconds(goodput) == {"start_up": 5, "productive": 4, "data_wait": 2}


times = st.integers(-(2**40), 2**62)
amounts = st.one_of(st.integers(0, 100 * S), st.integers(0, 2**64))
said = st.builds(Claims, *([amounts] * 9))
events = st.one_of(
    st.tuples(st.just("watch"), times, st.sampled_from(State), st.booleans()),
    st.tuples(st.just("add_claims"), times, said, times, times),
    st.tuples(st.just("start"), st.sampled_from("ab"), times, times),
    st.tuples(st.just("end"), times),
    st.tuples(st.just("restore")),
)


@given(st.lists(events, max_size=40), st.integers(0, 2**61))
def test_any_reports_sum_to_covered_time_and_settled_grows(
    reported: list[tuple[object, ...]], first: int
) -> None:
    goodput = GoodputTotals.begin("a", first)
    before = dict(goodput.settled)
    for kind, *values in reported:
        match kind, values:
            case "watch", [int(now), State() as state, bool(excused)]:
                goodput.watch(now, state, excused=excused)
            case "add_claims", [int(now), Claims() as claims, int(began), int(ended)]:
                goodput.add_claims(now, claims, began, ended)
            case "start", [str(process), int(at), int(now)]:
                goodput.start(process, at, now)
            case "end", [int(at)]:
                goodput.end(at)
            case _:
                goodput = msgspec.json.decode(packed(goodput), type=GoodputTotals)
        buckets = goodput.buckets()
        assert set(buckets) == set(Bucket)
        assert min(buckets.values()) >= 0
        assert sum(buckets.values()) == goodput.until_ns - first
        assert all(goodput.settled[bucket] >= ns for bucket, ns in before.items())
        before = dict(goodput.settled)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.booleans(), st.integers(0, 30)), max_size=30)
)
def test_reports_in_order_match_a_count_by_seconds(
    blocks: list[tuple[int, int, bool, int]],
) -> None:
    """Steps of so many seconds, some of them in data; now and then the process is killed and started."""
    goodput = GoodputTotals.begin("0", T)
    expected = dict.fromkeys(Bucket, 0)
    one, lives = Process(goodput, T), 1
    for length, data, killed, gap in blocks:
        data = min(data, length)
        one.works(length, data_wait=data)
        expected[Bucket.PRODUCTIVE] += length - data
        expected[Bucket.DATA_WAIT] += data
        if killed:
            goodput.end(one.now)
            one = Process(goodput, one.now + gap * S)
            goodput.start(str(lives), one.now, one.now)
            lives += 1
            one.lives(2, State.STARTING)
            expected[Bucket.RESTART_GAP] += gap
            expected[Bucket.START_UP] += 2
    assert {bucket: ns / S for bucket, ns in goodput.buckets().items()} == expected
    assert goodput.starts == lives
