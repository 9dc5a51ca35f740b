"""Captures of a whole job that rank 0's script orders: permissions, reports, and clean-up."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from torchperfd.captures.files import CapturesDirectory
from torchperfd.captures.job_capture import CaptureFetcher, JobCapture, JobCaptureOrders, chosen_ranks
from torchperfd.captures.state import CaptureOptions
from torchperfd.errors import CaptureError, CaptureTimeoutError
from torchperfd.link.outbox import Outbox
from torchperfd.v1 import contract, session_pb2

OPTIONS = CaptureOptions(3, record_shapes=True)
ID = "20260101-000000-abcdef"


class Line:
    """The orders, and the daemon's end of it."""

    def __init__(self, session: int = 1) -> None:
        self.session = session
        self.outbox: Outbox[session_pb2.ClientMessage] = Outbox(10)
        self.orders = JobCaptureOrders(
            self.outbox, lambda: self.session, lambda _, folder, names: Path(folder)
        )
        self.orders.on_welcome(contract.FEATURES)

    def sent(self) -> list[session_pb2.CaptureOrder]:
        """Return the orders that were sent since the last time."""
        return [message.capture_order for message in self.outbox.take(0, 10)]

    def report(
        self, state: str, reason: str = "", files: tuple[str, ...] = ("rank0.json", "rank1.json")
    ) -> None:
        """Say how far order 1 is."""
        self.orders.on_result(
            session_pb2.CaptureOrderResult(
                order_id=1,
                capture_id="20260101-000000-abcdef",
                state=state,
                ended=state in ("complete", "partial", "failed"),
                reason=reason,
                directory="/captures/one",
                start_step=40,
                steps=3,
                ranks=[session_pb2.OrderedRank(rank=rank, file=file) for rank, file in enumerate(files)],
            )
        )


def test_order_with_ranks_and_options_returns_a_path_per_rank() -> None:
    line = Line()
    capture = line.orders.order(0, [0, 1], OPTIONS)
    [order] = line.sent()
    assert (order.order_id, list(order.ranks), order.cancel) == (1, [0, 1], False)
    assert (order.options.steps, order.options.record_shapes, order.options.with_stack) == (3, True, False)
    assert (capture.id, capture.state, capture.step_range, capture.paths) == ("", "ordered", None, {})
    line.report("armed")
    assert (capture.id, capture.state) == ("20260101-000000-abcdef", "armed")
    assert (capture.step_range, capture.paths) == ((40, 43), {})
    with pytest.raises(CaptureError, match=r"is armed; wait\(\) for it"):
        _ = capture.path
    with pytest.raises(CaptureTimeoutError, match="is still armed after 0 s"):
        capture.wait(0)
    line.report("complete")
    assert capture.wait(0) == capture.path == Path("/captures/one")
    assert capture.paths == {0: Path("/captures/one/rank0.json"), 1: Path("/captures/one/rank1.json")}


def test_partial_capture_raises_with_rank_and_keeps_other_paths() -> None:
    line = Line()
    capture = line.orders.order(0, [], OPTIONS)
    line.report("partial", "rank 1: disk full", ("rank0.json", ""))
    with pytest.raises(CaptureError, match="is partial: rank 1: disk full"):
        capture.wait()
    assert capture.paths == {0: Path("/captures/one/rank0.json")}
    assert capture.state == "partial"


@pytest.mark.parametrize("after", [0, 2])
def test_a_daemon_that_goes_away_ends_the_waiting(after: int) -> None:
    line = Line()
    capture = line.orders.order(0, [], OPTIONS)
    line.report("armed")
    line.session = after
    assert capture.state == "failed"
    with pytest.raises(CaptureError, match="the daemon went away in the middle"):
        capture.wait(None)
    with pytest.raises(CaptureError, match="the daemon went away in the middle"):
        _ = capture.path
    line.orders.on_welcome(contract.FEATURES)
    line.report("complete")
    assert capture.state == "failed", "another daemon's order of the same number"


def test_progress_before_the_daemon_left_counts() -> None:
    line = Line()
    capture = line.orders.order(0, [], OPTIONS)
    line.report("complete")
    line.session = 0
    assert (capture.wait(), capture.state) == (Path("/captures/one"), "complete")


def test_giving_up_is_an_order_of_its_own() -> None:
    line = Line()
    capture = line.orders.order(0, [], OPTIONS)
    line.sent()
    capture.cancel()
    assert [(order.order_id, order.cancel) for order in line.sent()] == [(1, True)]


def test_rank_that_cannot_order_gets_the_remedy() -> None:
    line = Line()
    with pytest.raises(
        CaptureError, match="this is rank 3, and only rank 0 captures other ranks; call it there"
    ):
        line.orders.order(3, [], OPTIONS)
    line.session = 0
    with pytest.raises(CaptureError, match=r"no daemon is connected.*start one with `torchperfd serve`"):
        line.orders.order(0, [], OPTIONS)
    line.session = 2
    line.orders.on_welcome(["steps"])
    with pytest.raises(CaptureError, match="the daemon is too old"):
        line.orders.order(0, [], OPTIONS)
    assert line.sent() == []


@pytest.mark.parametrize("ranks", ["0,1", [], [-1], [2**32]])
def test_ranks_that_cannot_be_meant_are_refused(ranks: list[int]) -> None:
    with pytest.raises(ValueError, match='ranks must be "all" or ranks of the job'):
        chosen_ranks(ranks)


def test_all_is_no_list_and_a_list_is_in_order() -> None:
    assert chosen_ranks("all") == []
    assert chosen_ranks([3, 0, 3]) == [0, 3]


def test_answers_without_a_request_are_dropped() -> None:
    line = Line()
    line.report("complete")
    assert isinstance(line.orders.order(0, [], OPTIONS), JobCapture)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(OSError(5, "No answer"), "No answer"), (ValueError("it is cut off"), "it is cut off")],
)
def test_fetch_that_fails_has_the_reason(error: Exception, reason: str) -> None:
    def download(capture_id: str, name: str, timeout: float) -> Iterator[bytes]:
        yield b"{"
        raise error

    directory = CapturesDirectory()
    directory.folder(ID).mkdir(parents=True)
    fetcher = CaptureFetcher(directory, download)
    with pytest.raises(CaptureError, match=f"cannot fetch capture {ID} from the daemon: {reason}"):
        fetcher.fetch(ID, "/nonexistent", ["rank0.json"])
