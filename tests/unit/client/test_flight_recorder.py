"""How far collectives are, read from torch's record: as it is written, and however else it may come."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchperfd
from torchperfd.hooks.process_groups import read
from torchperfd.model.process import GroupProgress
from torchperfd.v1 import session_pb2

C10D = "torch._C._distributed_c10d"


def entry(number: int, group: int = 0, **more: Any) -> dict[str, Any]:
    """One collective as torch 2.13 writes it, over unless said otherwise."""
    return {
        "collective_seq_id": number,
        "input_sizes": [[4, 4], [10]],
        "is_p2p": False,
        "pg_id": group,
        "process_group": [str(group), "undefined" if group else "default_pg"],
        "profiling_name": "gloo:all_reduce",
        "retired": True,
        "state": "scheduled",
        **more,
    }


def record(*entries: dict[str, Any], **status: str) -> bytes:
    return json.dumps({"entries": entries, "pg_status": {"0": status}, "version": "2.10"}).encode()


def test_earliest_unfinished_collective_is_reported() -> None:
    late = record(entry(8), entry(9, retired=False), entry(10, retired=False), last_enqueued_collective="10")
    assert read(late) == [GroupProgress("0", "default_pg", 10, 9, "all_reduce", "4x4, 10")]


def test_group_with_all_collectives_finished_has_none() -> None:
    over = record(entry(8), entry(9, retired=False, state="completed"), last_enqueued_collective="12")
    assert read(over) == [GroupProgress("0", "default_pg", 12, 0, "", "")]


def test_groups_count_separately_and_point_to_point_not_at_all() -> None:
    entries = (
        entry(3),
        entry(1, 7, profiling_name="nccl:_all_gather_base", retired=False, input_sizes=[[]]),
        entry(9, retired=False, is_p2p=True),
        entry(2, 7, retired=False, input_sizes=[[1]] * 6),
    )
    assert read(record(*entries)) == [
        GroupProgress("0", "default_pg", 3, 0, "", ""),
        GroupProgress("7", "undefined", 2, 1, "_all_gather_base", "1"),
    ]
    assert read(record(entries[3])) == [GroupProgress("7", "undefined", 2, 2, "all_reduce", "1, 1, 1, 1, …")]


def test_no_collectives_are_no_groups() -> None:
    assert read(record()) == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*entry(1)]), inner),
    max_leaves=12,
)


@given(st.binary(max_size=20) | JSON.map(lambda each: json.dumps(each).encode()) | st.lists(JSON).map(
    lambda entries: json.dumps({"entries": entries}).encode()
))  # fmt: skip
def test_what_is_no_record_is_refused_in_one_way(text: bytes) -> None:
    try:
        groups = read(text)
    except ValueError:
        return
    assert all(isinstance(group, GroupProgress) for group in groups)


@given(st.dictionaries(st.sampled_from([*entry(1)]), JSON))
def test_an_entry_of_another_form_is_refused_in_one_way(more: dict[str, Any]) -> None:
    try:
        (group,) = read(record({**entry(1), **more}))
    except ValueError:
        return
    assert group.begun >= 0 or more


def answer(client: torchperfd.Client) -> session_pb2.CollectiveReport:
    client.parts.outbox.take(0, 1000)
    client.parts.daemon_session.handle_command(
        session_pb2.DaemonMessage(tell_collectives=session_pb2.TellCollectives(request_id=7))
    )
    (message,) = (one for one in client.parts.outbox.take(0, 1000) if one.HasField("collective_report"))
    assert message.collective_report.request_id == 7
    return message.collective_report


def test_client_reports_the_record_of_torch(
    client: torchperfd.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumped = record(entry(9, retired=False))
    older = SimpleNamespace(_dump_nccl_trace_json=lambda collectives, active: dumped)
    monkeypatch.setitem(sys.modules, C10D, older)
    (group,) = answer(client).groups
    assert (group.name, group.description, group.begun, group.number) == ("0", "default_pg", 9, 9)
    assert (group.call, group.sizes) == ("all_reduce", "4x4, 10")


def test_client_without_record_reports_no_groups(
    client: torchperfd.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, C10D, raising=False)
    assert not answer(client).groups
    broken = SimpleNamespace(_dump_fr_trace_json=lambda collectives, active: b"{")
    monkeypatch.setitem(sys.modules, C10D, broken)
    assert not answer(client).groups
    assert client.parts.instruments.faults.counts() == {"flight recorder": 1}
