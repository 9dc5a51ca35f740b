"""A capture whose daemon died in the middle: what its ranks wrote is what is known of it."""

from hypothesis import given
from hypothesis import strategies as st

from torchperfd_daemon.captures.manifest import (
    CaptureOptions,
    CaptureRecord,
    CaptureState,
    RankManifest,
    RankTrace,
)

NO_REPORT = "no report from this rank; the daemon ended during the capture"
live = st.sampled_from([CaptureState.PREPARING, CaptureState.ARMED])
ended = st.sampled_from([CaptureState.COMPLETE, CaptureState.FAILED])


def own(rank: int, state: CaptureState) -> RankManifest:
    whole = state is CaptureState.COMPLETE
    reason, file = ("", f"rank{rank}.json") if whole else ("own words", "")
    return RankManifest(rank, state, reason, file, 9, "ab", (40, 45), CaptureOptions())


@given(
    st.dictionaries(st.integers(0, 9), st.one_of(live, ended), min_size=1),
    st.dictionaries(st.integers(0, 9), ended),
    st.booleans(),
)
def test_each_rank_has_its_own_word_or_none_once_time_is_up(
    known: dict[int, CaptureState], written: dict[int, CaptureState], over: bool
) -> None:
    ranks = [RankTrace(rank, state, clock_offset_ns=-7) for rank, state in sorted(known.items())]
    record = CaptureRecord("one", "bert", "command", 0.0, CaptureState.ARMED, ranks=ranks, ends_by=100.0)
    record.add_rank_manifests([own(rank, state) for rank, state in written.items()], 101.0 if over else 99.0)
    for trace in record.ranks:
        if known[trace.rank].ended:
            assert (trace.state, trace.reason) == (known[trace.rank], "")
        elif trace.rank in written:
            reported = own(trace.rank, written[trace.rank])
            assert (trace.state, trace.reason, trace.file) == (reported.state, reported.reason, reported.file)
            assert trace.clock_offset_ns == -7
        else:
            expected = (CaptureState.FAILED, NO_REPORT) if over else (known[trace.rank], "")
            assert (trace.state, trace.reason) == expected
    states = {trace.state for trace in record.ranks}
    if any(not state.ended for state in states):
        assert record.state is CaptureState.ARMED
    elif states == {CaptureState.COMPLETE}:
        assert record.state is CaptureState.COMPLETE
    else:
        partial = CaptureState.COMPLETE in states
        assert record.state is (CaptureState.PARTIAL if partial else CaptureState.FAILED)


def test_missing_deadline_never_expires() -> None:
    record = CaptureRecord("one", "bert", "command", 0.0, ranks=[RankTrace(0)])
    record.add_rank_manifests([], 1e11)
    assert record.state is CaptureState.PREPARING


def test_complete_trace_has_the_agreed_steps() -> None:
    record = CaptureRecord("one", "bert", "command", 0.0, ranks=[RankTrace(0), RankTrace(1)], ends_by=1.0)
    record.add_rank_manifests([own(1, CaptureState.COMPLETE)], 2.0)
    assert (record.state, record.step_range) == (CaptureState.PARTIAL, (40, 45))
    assert record.reason == f"rank 0: {NO_REPORT}"
