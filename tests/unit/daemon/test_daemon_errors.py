"""What commands say when a call fails: our own words with a remedy, never gRPC's."""

import grpc
import pytest

from torchperfd_cli.commands._daemon import _translated
from torchperfd_daemon.errors import (
    DaemonUnreachableError,
    DeadlineError,
    IncompatibleVersionError,
    NoSuchTargetError,
    TorchperfdError,
    UsageError,
)

RAW = "failed to connect to all addresses; last error: FAILED_PRECONDITION: unix:d.sock: connect failed"


class Failure(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str | None) -> None:
        super().__init__()
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str | None:
        return self._details


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (grpc.StatusCode.UNAVAILABLE, DaemonUnreachableError, "the daemon at /d.sock has ended"),
        (grpc.StatusCode.CANCELLED, DaemonUnreachableError, "the daemon at /d.sock has ended"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineError, "has not answered in time"),
        (grpc.StatusCode.UNIMPLEMENTED, IncompatibleVersionError, "is too old for this request"),
    ],
)
def test_failed_call_of_grpc_is_said_in_our_words(
    code: grpc.StatusCode, kind: type[TorchperfdError], words: str
) -> None:
    error = _translated(Failure(code, RAW), "/d.sock")
    assert type(error) is kind
    assert words in str(error)
    assert "; " in str(error), "and what to do"
    assert "connect to all" not in str(error)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.NOT_FOUND, NoSuchTargetError),
        (grpc.StatusCode.INVALID_ARGUMENT, UsageError),
        (grpc.StatusCode.FAILED_PRECONDITION, TorchperfdError),
    ],
)
def test_failed_call_of_the_daemon_keeps_its_words(
    code: grpc.StatusCode, kind: type[TorchperfdError]
) -> None:
    error = _translated(Failure(code, "no run x on this node; see ps"), "/d.sock")
    assert (type(error), str(error)) == (kind, "no run x on this node; see ps")


def test_failed_call_of_unknown_kind_points_to_the_log() -> None:
    text = str(_translated(Failure(grpc.StatusCode.UNKNOWN, "Unexpected KeyError\ntraceback"), "/d.sock"))
    assert text == "the daemon at /d.sock failed: Unexpected KeyError; see its log"
