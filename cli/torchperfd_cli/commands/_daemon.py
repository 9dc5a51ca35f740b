"""The connection of a command to a daemon: translates gRPC's errors, and cleans texts for the terminal."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from torchperfd._version import __version__
from torchperfd.model.formatting import one_line
from torchperfd.v1 import access, contract, control_pb2, control_pb2_grpc, session_pb2
from torchperfd_daemon.errors import (
    DaemonUnreachableError,
    DeadlineError,
    IncompatibleVersionError,
    NoSuchTargetError,
    NotAllowedError,
    TorchperfdError,
    UsageError,
)

_CONNECT_TIMEOUT_S = 5.0
_MAX_REASON = 200
# Of a fleet's ranks each takes more than a kilobyte.
_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 64 * 2**20))
_MAX_CHARACTERS: Final = 4096
_BUSY = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)


@contextlib.contextmanager
def connect(
    socket: str | None, answer_seconds: float = _CONNECT_TIMEOUT_S
) -> Iterator[control_pb2_grpc.ControlStub]:
    """Yield a stub of the first daemon that answers.

    Args:
        socket: The only path to try; the usual places when None.

    Raises:
        DaemonUnreachableError: None answers.
        IncompatibleVersionError: It supports no common protocol version.
        TorchperfdError: A call within the block failed.
    """
    paths = (socket,) if socket else contract.socket_candidates()
    refused = []
    busy = ""
    for path in paths:
        try:
            access.find_listener(path)
        except access.UntrustedError as error:
            refused.append(str(error))
            continue
        except OSError:
            continue
        with grpc.insecure_channel(f"unix:{path}", options=_OPTIONS) as channel:
            stub = control_pb2_grpc.ControlStub(CleanChannel(channel))  # type: ignore[arg-type]
            try:
                info = stub.GetInfo(
                    control_pb2.GetInfoRequest(
                        api=session_pb2.ApiRange(min=contract.API_MIN, max=contract.API_MAX)
                    ),
                    timeout=answer_seconds,
                )
            except grpc.RpcError as error:
                if error.code() in _BUSY:
                    busy = busy or path
                continue
            if contract.overlapping_api(info.api.min, info.api.max) is None:
                raise IncompatibleVersionError(
                    f"this command (torchperfd {__version__}) speaks protocol {contract.API_MIN} to"
                    f" {contract.API_MAX}, the daemon (torchperfd {info.version}) speaks"
                    f" {info.api.min} to {info.api.max}",
                    "install the same version on both sides",
                )
            try:
                yield stub
            except grpc.RpcError as error:
                raise _translated(error, path) from error
            return
    if busy:
        raise DaemonUnreachableError(
            f"the daemon at {busy} is busy: no answer within {answer_seconds:g} s",
            "try again, or see its log",
        )
    if refused:
        raise DaemonUnreachableError("; ".join(refused))
    if len(paths) == 1:
        raise DaemonUnreachableError(
            f"no daemon answers at {' or '.join(paths)}", "start one with `torchperfd serve`"
        )
    raise DaemonUnreachableError(
        "no training runs under torchperfd on this machine", "start one with `torchperfd run train.py`"
    )


def find_daemon(socket: str | None) -> tuple[str, control_pb2.GetInfoResponse]:
    """Return the socket of the first daemon that answers, and its answer.

    Args:
        socket: The only path to try; the usual places when None.

    Raises:
        DaemonUnreachableError: None answers.
    """
    *others, last = (socket,) if socket else contract.socket_candidates()
    service: DaemonUnreachableError | None = None
    for path in others:
        try:
            with connect(path) as daemon:
                return path, daemon.GetInfo(control_pb2.GetInfoRequest(), timeout=_CONNECT_TIMEOUT_S)
        except DaemonUnreachableError as error:
            service = error
    try:
        with connect(last) as daemon:
            return last, daemon.GetInfo(control_pb2.GetInfoRequest(), timeout=_CONNECT_TIMEOUT_S)
    except DaemonUnreachableError:
        # A node with the service's directory should have its daemon, whatever this user could start.
        if service and Path(contract.SYSTEM_SOCKET).parent.is_dir():
            raise service from None
        raise


def _translated(error: grpc.RpcError, path: str) -> TorchperfdError:
    """Return a call's failure as an error: the daemon's messages are kept, those of gRPC are translated."""
    details = error.details() or "no details given"
    code = error.code()
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return DaemonUnreachableError(
            f"the daemon at {path} has ended",
            "that of `torchperfd run` ends with its run; `torchperfd ps` shows whether another answers",
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"the daemon at {path} has not answered in time", "try again, or see its log")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return IncompatibleVersionError(
            f"the daemon at {path} is too old for this request",
            "install the same version on both sides, and restart it",
        )
    kinds: dict[grpc.StatusCode, type[TorchperfdError]] = {
        grpc.StatusCode.NOT_FOUND: NoSuchTargetError,
        grpc.StatusCode.INVALID_ARGUMENT: UsageError,
        grpc.StatusCode.FAILED_PRECONDITION: TorchperfdError,
        grpc.StatusCode.RESOURCE_EXHAUSTED: TorchperfdError,
        grpc.StatusCode.PERMISSION_DENIED: NotAllowedError,
    }
    if code in kinds:
        return kinds[code](details)
    reason = details.splitlines()[0][:_MAX_REASON]
    return TorchperfdError(f"the daemon at {path} failed: {reason}", "see its log")


M = TypeVar("M", bound=Message)


def clean(message: M) -> M:
    """Make every text in a message, and in those that it holds, one line; return the message."""
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _clean_map(value)
        elif field.type == FieldDescriptor.TYPE_STRING:
            if isinstance(value, str):
                if not value.isprintable() or len(value) > _MAX_CHARACTERS:
                    setattr(message, field.name, one_line(value, _MAX_CHARACTERS))
            else:
                value[:] = [one_line(each, _MAX_CHARACTERS) for each in value]
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            for each in (value,) if isinstance(value, Message) else value:
                clean(each)
    return message


def _clean_map(entries: Any) -> None:
    for key in list(entries):
        value = entries[key]
        if isinstance(value, Message):
            clean(value)
            continue
        cleaned = one_line(value, _MAX_CHARACTERS) if isinstance(value, str) else value
        name = one_line(key, _MAX_CHARACTERS) if isinstance(key, str) else key
        if (name, cleaned) != (key, value):
            del entries[key]
            entries[name] = cleaned


class CleanChannel:
    """A channel whose answers are cleaned as they are read, for stubs."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        return self._channel.unary_unary(*arguments, **_cleaning(named))

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        return self._channel.unary_stream(*arguments, **_cleaning(named))


def _cleaning(named: dict[str, Any]) -> dict[str, Any]:
    read: Callable[[bytes], Message] = named["response_deserializer"]
    return {**named, "response_deserializer": lambda data: clean(read(data))}
