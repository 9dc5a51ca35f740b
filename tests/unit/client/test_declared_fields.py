"""Dataclasses to messages and documents and back, as their fields declare it."""

import math
from dataclasses import dataclass
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd.model.messages import AtMost, Known, Name, Wire, from_document, pack, to_document, unpack
from torchperfd.model.process import Coordinate
from torchperfd.model.source_lines import InputStages, SlowLine, SyncWait
from torchperfd.model.step_account import Account, Part, PartKind
from torchperfd.model.totals import PhaseTotals, StatusTotals
from torchperfd.v1 import control_pb2, session_pb2


@dataclass(frozen=True)
class Lines:
    """Two repeated fields of an account, of which few are read."""

    sync_waits: Annotated[tuple[SyncWait, ...], AtMost(2)] = ()
    switches: Annotated[tuple[Name, ...], AtMost(1)] = ()
    peak: Annotated[Known | None, Wire("peak_flops")] = None


def test_repeated_fields_are_read_up_to_their_limit() -> None:
    waits = [session_pb2.SyncWait(file="a", line=n, ns=2**63) for n in range(5)]
    read = unpack(session_pb2.Account(sync_waits=waits, switches=["A\n=1", "B"], peak_flops=2.5), Lines)
    assert [(wait.line, wait.ns) for wait in read.sync_waits] == [(0, 2**58), (1, 2**58)]
    assert (read.switches, read.peak) == (("A?=1",), 2.5)


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_value_out_of_range_is_unknown(value: float) -> None:
    assert unpack(session_pb2.Account(peak_flops=value), Lines).peak is None


def test_absent_field_is_none_and_is_not_sent() -> None:
    assert unpack(session_pb2.Account(), Lines).peak is None
    assert not pack(session_pb2.Account, Lines()).HasField("peak_flops")
    assert pack(session_pb2.Account, Lines(peak=0.0)).HasField("peak_flops")


def test_number_without_presence_stands_for_none() -> None:
    # LoaderUse.cpus cannot be absent.
    status = control_pb2.RankStatus(loader=session_pb2.LoaderUse(workers=2))
    assert unpack(status, StatusTotals).loader is not None
    assert getattr(unpack(status, StatusTotals).loader, "cpus", 1.0) is None


def test_text_is_one_short_line_before_it_is_sent() -> None:
    line = SlowLine("fetch\x1b[2J", 2.0, file="f" * 999)
    message = pack(control_pb2.SlowLine, line)
    assert (message.stage, len(message.file)) == ("fetch?[2J", 500)
    assert unpack(message, SlowLine).stage_share == 0.0


def test_other_values_come_before_declared_ones() -> None:
    message = pack(session_pb2.PhaseAccount, PhaseTotals(3, 9), phase="data", calls=4)
    assert (message.phase, message.calls, message.ns) == ("data", 4, 9)
    assert unpack(message, PhaseTotals, calls=7) == PhaseTotals(7, 9)


def test_enumeration_is_sent_as_its_value() -> None:
    account = Account(1.0, 1.1, (Part(PartKind.LATE_RANK, "", 0.5, 3),))
    message = pack(control_pb2.StepAccount, account)
    assert message.parts[0].kind == "late_rank"
    assert unpack(message, Account) == account
    message.parts[0].kind = "of a newer version"
    assert unpack(message, Account).parts[0].kind is PartKind.UNNAMED


@given(
    st.builds(
        SyncWait,
        st.sampled_from(["a.py", "b/c.py"]),
        st.integers(0, 99),
        st.just("item"),
        st.integers(0, 2**53),
    )
)
def test_documents_have_seconds_for_nanoseconds(wait: SyncWait) -> None:
    document = to_document(wait)
    assert list(document) == ["file", "line", "call", "seconds_total"]
    assert from_document(document, SyncWait).ns == pytest.approx(wait.ns, abs=1)


def test_missing_or_null_value_has_its_default() -> None:
    assert from_document({"workers": 2, "idle": None}, InputStages) == InputStages(workers=2)
    with pytest.raises(KeyError):
        from_document({"rank": 1, "size": 2}, Coordinate)


@pytest.mark.parametrize(
    "damage", [{"line": -1}, {"line": "1"}, {"file": 3}, {"share": math.nan}, {"share": True}]
)
def test_damaged_value_of_a_document_is_an_error(damage: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="missing"):
        from_document({"stage": "fetch", "stage_share": 0.5, **damage}, SlowLine)
