"""Stacks, pure: reading faulthandler's text, merging what is identical, and naming who stands apart."""

import faulthandler
import sys
import tempfile
import threading
import traceback
from collections import Counter
from dataclasses import replace
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.golden import check_golden

from torchperfd.document.terminal import render
from torchperfd_daemon.stacks.activity import Kind, activity
from torchperfd_daemon.stacks.merge import merge
from torchperfd_daemon.stacks.model import Frame, Outcome, RankStacks, Thread, parse_dump, tidy
from torchperfd_daemon.stacks.report import sentence, stacks_document, to_dict
from torchperfd_daemon.text import ranks_text
from torchperfd_daemon.views.model import parse_ranks

PACKAGE = "/env/site-packages/torchperfd/"
TORCH = "/env/lib/python3.11/site-packages/torch"
MODULE = Frame("/job/train.py", 90, "<module>")
TRAIN = Frame("/job/train.py", 37, "main")
ALL_REDUCE = (
    Frame(f"{TORCH}/distributed/distributed_c10d.py", 3252, "all_reduce"),
    Frame(f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"),
    TRAIN,
    MODULE,
)
BARRIER = (Frame(f"{TORCH}/distributed/distributed_c10d.py", 5000, "barrier"), TRAIN, MODULE)
BACKWARD = (
    Frame(f"{TORCH}/autograd/graph.py", 869, "_engine_run_backward"),
    Frame(f"{TORCH}/autograd/__init__.py", 395, "backward"),
    TRAIN,
    MODULE,
)
FORWARD = (Frame("/job/train.py", 41, "forward"), TRAIN, MODULE)
LOADING = (
    Frame("/env/lib/python3.11/threading.py", 331, "wait"),
    Frame(f"{TORCH}/utils/data/dataloader.py", 1294, "_next_data"),
    TRAIN,
    MODULE,
)


def rank(number: int, frames: tuple[Frame, ...], **more: object) -> RankStacks:
    outcome = Outcome.ANSWERED if frames else Outcome.GONE
    threads = (Thread(1, "MainThread", True, False, frames),) if frames else ()
    return RankStacks(number, 4, "node-a", 4000 + number, outcome, threads=threads, **more)  # type: ignore[arg-type]


def finding(*stacks: tuple[Frame, ...]) -> tuple[str, list[int]]:
    merged = merge([rank(number, frames) for number, frames in enumerate(stacks)])
    return sentence(merged), list(merged.odd)


@pytest.mark.parametrize(
    ("stacks", "words", "odd"),
    [
        (
            [ALL_REDUCE, ALL_REDUCE, FORWARD, ALL_REDUCE],
            "rank 2 is at train.py:41 in forward; ranks 0-1,3 wait in all_reduce (train.py:37 in main)",
            [2],
        ),
        (
            [BARRIER, ALL_REDUCE, ALL_REDUCE],
            "rank 0 waits in barrier (train.py:37 in main);"
            " ranks 1-2 wait in all_reduce (train.py:37 in main)",
            [0],
        ),
        (
            [ALL_REDUCE, FORWARD],
            "rank 1 is at train.py:41 in forward; rank 0 waits in all_reduce (train.py:37 in main)",
            [1],
        ),
        (
            [BACKWARD, BACKWARD, LOADING],
            "rank 2 waits for data (train.py:37 in main); ranks 0-1 are in backward (train.py:37 in main)",
            [2],
        ),
        (
            [BACKWARD, FORWARD],
            "rank 0 is in backward (train.py:37 in main); rank 1 is at train.py:41 in forward",
            [],
        ),
        (
            [ALL_REDUCE, BACKWARD, FORWARD],
            "rank 2 is at train.py:41 in forward; rank 0 waits in all_reduce (train.py:37 in main);"
            " rank 1 is in backward (train.py:37 in main)",
            [2],
        ),
        (
            [FORWARD, FORWARD, BARRIER],
            "rank 2 waits in barrier (train.py:37 in main); ranks 0-1 are at train.py:41 in forward",
            [2],
        ),
        ([ALL_REDUCE] * 3, "ranks 0-2 wait in all_reduce (train.py:37 in main)", []),
        ([(), ALL_REDUCE], "rank 0 is gone; rank 1 waits in all_reduce (train.py:37 in main)", [0]),
        ([()], "rank 0 is gone", [0]),
    ],
)
def test_one_sentence_names_the_rank_apart(
    stacks: list[tuple[Frame, ...]], words: str, odd: list[int]
) -> None:
    assert finding(*stacks) == (words, odd)


@given(st.lists(st.sampled_from([ALL_REDUCE, BARRIER, BACKWARD, FORWARD, LOADING, ()]), max_size=12))
def test_groups_are_what_counting_by_hand_gives(stacks: list[tuple[Frame, ...]]) -> None:
    merged = merge([rank(number, frames) for number, frames in enumerate(stacks)])
    reported = [frames for frames in stacks if frames]
    assert {group.frames: len(group.ranks) for group in merged.groups} == dict(Counter(reported))
    for group in merged.groups:
        assert [number for number, frames in enumerate(stacks) if frames == group.frames] == list(group.ranks)
    sizes = [len(group.ranks) for group in merged.groups]
    assert sizes == sorted(sizes, reverse=True)
    assert [one.rank for one in merged.without_stacks] == [
        number for number, frames in enumerate(stacks) if not frames
    ]
    odd = {frames for number, frames in enumerate(stacks) if frames and number in merged.odd}
    for frames in set(reported):
        if 2 * reported.count(frames) > len(reported):
            assert odd == set(reported) - {frames}
    if len(odd) == len(set(reported)):
        assert not reported, "no rank is left to compare the odd ones with"
    mentioned = [number for number in range(len(stacks)) if f"rank {number} " in sentence(merged)]
    assert set(mentioned) >= {one.rank for one in merged.without_stacks[:4]}


@given(st.sets(st.integers(0, 40)))
def test_ranks_are_written_as_the_option_takes_them(ranks: set[int]) -> None:
    assert parse_ranks(ranks_text(sorted(ranks))) == sorted(ranks)


def test_collective_called_by_the_script_is_named_not_its_parts() -> None:
    c10d = f"{TORCH}/distributed/distributed_c10d.py"
    gathered = (Frame(c10d, 1, "all_gather"), Frame(c10d, 2, "all_gather_object"), *FORWARD)
    assert (activity(gathered).call, activity(gathered).place) == ("all_gather_object", FORWARD[0])
    synced = (
        Frame(f"{TORCH}/nn/parallel/distributed.py", 2310, "_distributed_broadcast_coalesced"),
        Frame(f"{TORCH}/nn/parallel/distributed.py", 1700, "forward"),
        *FORWARD,
    )
    assert activity(synced).kind is Kind.COLLECTIVE
    assert activity((Frame("<string>", 1, "f"),)).place == Frame("<string>", 1, "f")


def test_place_of_a_collective_is_its_caller_not_a_backend() -> None:
    backend = (Frame("/job/my_backend.py", 7, "wait"), Frame("/job/my_backend.py", 20, "barrier"))
    found = activity((*backend, *BARRIER))
    assert (found.kind, found.call, found.place) == (Kind.COLLECTIVE, "barrier", TRAIN)
    without_a_script = activity((*backend, BARRIER[0]))
    assert without_a_script.place == backend[0]


def test_training_continues_only_while_every_rank_steps() -> None:
    well = [rank(number, FORWARD, seconds_since_step=1.0, step_seconds=0.1) for number in range(2)]
    assert merge(well).goes_on
    assert not merge([*well, rank(2, FORWARD, seconds_since_step=40.0, step_seconds=0.1)]).goes_on
    assert merge([*well, rank(2, FORWARD, seconds_since_step=40.0, step_seconds=20.0)]).goes_on
    assert not merge([*well, rank(2, FORWARD)]).goes_on
    assert not merge([*well, rank(2, (), seconds_since_step=1.0)]).goes_on


def test_own_frames_are_left_out_unless_they_hang() -> None:
    ours = Frame(f"{PACKAGE}hooks/loaders.py", 5, "__next__")
    started = (Frame(f"{PACKAGE}script.py", 50, "execute"), Frame("<frozen runpy>", 88, "_run_code"))
    main, hung, own, grpc, alien = tidy(
        (
            Thread(1, "", True, False, (FORWARD[0], ours, TRAIN, MODULE, *started)),
            Thread(2, "", False, False, (ours, TRAIN, MODULE, *started)),
            Thread(3, "", False, False, (ours, *_started_in(f"{PACKAGE}flusher.py"))),
            Thread(4, "", False, False, _started_in("/env/site-packages/grpc/_channel.py")),
            Thread(5, "", False, False, (ours, *_started_in("/job/train.py"))),
        ),
        PACKAGE,
    )
    assert main.frames == FORWARD
    assert hung.frames == (ours, TRAIN, MODULE)
    assert [thread.own for thread in (main, hung, own, grpc, alien)] == [False, False, True, True, False]
    assert own.frames == (ours, *_started_in(f"{PACKAGE}flusher.py"))
    threads = (main, own)
    assert tidy(threads, "") is threads


@pytest.mark.parametrize("wrapper", ["hooks/distributed.py", "hooks/collectives.py"])
def test_ddp_buffer_broadcast_is_a_collective_without_our_frame(wrapper: str) -> None:
    """DDP broadcasts buffers ahead of a forward: the call goes through our wrapper into C++.

    A client of the version before this one has it in another file.
    """
    ours = Frame(f"{PACKAGE}{wrapper}", 68, "broadcast")
    replication = f"{TORCH}/nn/parallel/distributed.py"
    frames = (
        Frame(replication, 2132, "_distributed_broadcast_coalesced"),
        Frame(replication, 2210, "_default_broadcast_coalesced"),
        Frame(replication, 2170, "_sync_buffers"),
        Frame(replication, 1600, "_pre_forward"),
        TRAIN,
        MODULE,
    )
    (main,) = tidy((Thread(1, "", True, False, (ours, *frames)),), PACKAGE)
    assert main.frames == frames
    for seen in ((ours, *frames), frames):
        reported = activity(seen)
        assert (reported.kind, reported.call) == (Kind.COLLECTIVE, "DistributedDataParallel's broadcast")
        assert reported.place == TRAIN


def _started_in(file: str) -> tuple[Frame, ...]:
    threading_py = "/usr/lib/python3.11/threading.py"
    return (
        Frame(file, 9, "_run"),
        Frame(threading_py, 982, "run"),
        Frame(threading_py, 1045, "_bootstrap_inner"),
        Frame(threading_py, 1002, "_bootstrap"),
    )


def test_what_faulthandler_writes_is_what_the_interpreter_knows() -> None:
    release, ready = threading.Event(), threading.Event()

    def naïve() -> None:
        ready.set()
        release.wait()

    thread = threading.Thread(target=naïve)
    thread.start()
    ready.wait()
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        text = file.read().decode()
    known = {ident: _frames(frame) for ident, frame in sys._current_frames().items()}
    parsed = {one.ident: one for one in parse_dump(text, thread.ident or 0)}
    release.set()
    thread.join()
    assert set(parsed) == set(known)
    assert [one.ident for one in parsed.values() if one.training] == [thread.ident]
    assert parsed[thread.ident or 0].frames == tuple(known[thread.ident or 0])
    assert [frame.function for frame in parsed[thread.ident or 0].frames].count("naïve") == 1
    here = parsed[threading.get_ident()].frames
    assert [frame.function for frame in here] == [frame.function for frame in known[threading.get_ident()]]


def _frames(frame: FrameType) -> list[Frame]:
    walked = traceback.walk_stack(frame)
    return [Frame(each.f_code.co_filename, line, each.f_code.co_name) for each, line in walked][:100]


def _written(name: str) -> str:
    """Write a name as a handler of a signal does: ASCII as it is, the rest by number."""
    return name.encode("ascii", "backslashreplace").decode()


names = st.text(
    st.characters(min_codepoint=32, exclude_characters='\\"\x7f', exclude_categories=["Cs", "Cc"])
)
frames = st.builds(Frame, names, st.integers(0, 10**6), names)


@given(
    st.lists(
        st.tuples(st.integers(1, 2**64 - 1), st.lists(frames, max_size=5)),
        min_size=1,
        unique_by=lambda t: t[0],
    ),
    st.sampled_from(["", " [a [worker] thread]"]),
)
def test_every_dump_is_read_as_it_was_meant(threads: list[tuple[int, list[Frame]]], named: str) -> None:
    text = ""
    for number, (ident, stack) in enumerate(threads):
        header = "Current thread" if number == 0 else "Thread"
        text += f"{header} 0x{ident:016x}{named} (most recent call first):\n"
        for frame in stack:
            line = frame.line or "???"
            text += f'  File "{_written(frame.file)}", line {line} in {_written(frame.function)}\n'
        text += "  <no Python frame>\n\n" if not stack else "  ...\n\n"
    parsed = parse_dump(text, threads[0][0])
    assert [(one.ident, list(one.frames)) for one in parsed] == threads
    assert [one.training for one in parsed] == [True] + [False] * (len(threads) - 1)
    assert {one.name for one in parsed} == ({"a [worker] thread"} if named else {""})
    unknown = parse_dump(text, 0)
    assert [one.training for one in unknown] == [False] * (len(threads) - 1) + [True]


@given(
    st.text(st.sampled_from('Thread 0x1f(mostrecncalli):\n  File "a", line 9 in b\\U0010ffff')) | st.text()
)
def test_text_of_any_other_kind_is_passed_over(text: str) -> None:
    for thread in parse_dump(text, 0):
        for frame in thread.frames:
            assert frame.line >= 0


def _run() -> list[RankStacks]:
    other = Thread(2, "Thread-3 (_pin_memory_loop)", False, False, _started_in(f"{TORCH}/utils/data/pin.py"))
    own = Thread(3, "torchperfd-flusher", False, True, _started_in(f"{PACKAGE}flusher.py"))
    steps = {"step": 118, "step_seconds": 0.125, "seconds_since_step": 34.0}
    waiting = [rank(number, ALL_REDUCE, **steps, phase="backward") for number in (0, 1, 3)]
    waiting = [replace(one, threads=(*one.threads, other, own)) for one in waiting]
    held = RankStacks(
        2,
        6,
        "node-a",
        4002,
        Outcome.READ,
        "no Python thread of it answers, as when native code holds the interpreter",
        (Thread(1, "", True, False, FORWARD),),
        seconds_since_step=33.0,
    )
    stopped = RankStacks(
        4, 6, "node-a", 4004, Outcome.STOPPED, "by a signal; let it go on with `kill -CONT 4004`"
    )
    return [*waiting, held, stopped]


def test_draw_from_a_wrapped_iterable_waits_for_data() -> None:
    wrapped = Frame(f"{PACKAGE}steps/wrapped.py", 41, "__next__")
    shards = Frame("/job/shards.py", 8, "batches")
    hook = Frame(f"{PACKAGE}launch/runner.py", 9, "run")
    (thread,) = tidy((Thread(1, "MainThread", True, False, (shards, wrapped, TRAIN, hook)),), PACKAGE)
    assert thread.frames == (shards, wrapped, TRAIN)
    assert (activity(thread.frames).kind, activity(thread.frames).place) == (Kind.DATA, shards)
    assert activity((wrapped, TRAIN)).place == TRAIN


def _worker(number: int, *frames: Frame) -> Thread:
    started = (Frame("/env/lib/python3.11/multiprocessing/process.py", 108, "run"), *LOADING)
    return Thread(0, "", False, False, (*frames, *started), 5000 + number, number)


def _loaders() -> list[RankStacks]:
    loop = Frame(f"{TORCH}/utils/data/_utils/worker.py", 374, "_worker_loop", "fetch")
    fetch = Frame(f"{TORCH}/utils/data/_utils/fetch.py", 54, "fetch")
    slow = Frame("/job/data.py", 37, "__getitem__", "sleep")
    idle = Frame(f"{TORCH}/utils/data/_utils/worker.py", 330, "_worker_loop", "get")
    waiting = Thread(1, "MainThread", True, False, LOADING)
    busy = [_worker(number, slow, fetch, loop) for number in (0, 1)]
    return [
        RankStacks(0, 2, "node-a", 4000, Outcome.ANSWERED, threads=(waiting, *busy, _worker(2, idle))),
        RankStacks(1, 2, "node-a", 4001, Outcome.ANSWERED, threads=(waiting, busy[0])),
    ]


def test_workers_are_grouped_by_what_they_do() -> None:
    reported = _loaders()
    merged = merge(reported)
    assert [(group.workers, group.loading.stage.value) for group in merged.workers] == [
        (((0, 0), (0, 1), (1, 0)), "fetch"),
        (((0, 2),), "wait"),
    ]
    assert merged.others == ()
    assert sentence(merged) == (
        "ranks 0-1 wait for data (train.py:37 in main);"
        " DataLoader workers of ranks 0-1, 3 workers: fetch at data.py:37 in __getitem__, calling sleep"
    )
    text = render(stacks_document("bert-17", reported, merged))
    assert (
        "\nDataLoader workers of ranks 0-1, 3 workers: fetch at data.py:37 in __getitem__, calling sleep\n"
        "  __getitem__   /job/data.py:37\n"
        "  fetch         torch/utils/data/_utils/fetch.py:54\n"
        "  _worker_loop  torch/utils/data/_utils/worker.py:374\n"
        "\nDataLoader worker 2 of rank 0: waits for indices\n"
    ) in text
    document = to_dict("bert-17", reported, merged, [])["workers"][0]
    assert document["workers"][2] == {"rank": 1, "worker": 0}
    assert (document["stage"], document["place"]["line"], document["call"]) == ("fetch", 37, "sleep")


def test_the_text_is_the_golden_file() -> None:
    reported = sorted(_run(), key=lambda one: one.rank)
    check_golden("stacks.txt", render(stacks_document("bert-17", reported, merge(reported))) + "\n")


def test_the_document_has_every_thread_and_what_they_come_to() -> None:
    reported = sorted(_run(), key=lambda one: one.rank)
    document = to_dict("bert-17", reported, merge(reported), [5])
    assert (document["schema"], document["run"]) == ("torchperfd.stacks/1", "bert-17")
    assert (document["odd"], document["absent"]) == ([2, 4], [5])
    assert document["groups"][0] == {
        "ranks": [0, 1, 3],
        "doing": "collective",
        "call": "all_reduce",
        "place": {"file": "/job/train.py", "line": 37, "function": "main", "call": ""},
    }
    outcomes = [one["outcome"] for one in document["ranks"]]
    assert outcomes == ["answered", "answered", "read", "answered", "stopped"]
    assert [thread["own"] for thread in document["ranks"][0]["threads"]] == [False, False, True]
    assert document["ranks"][2]["threads"][0]["frames"][0] == {
        "file": "/job/train.py",
        "line": 41,
        "function": "forward",
        "call": "",
    }
