"""Kept captures: what a caller may list, pin and remove in the daemon's captures directory."""

from collections.abc import Iterator

import msgspec

from torchperfd.v1 import control_pb2
from torchperfd_daemon.captures import CaptureState, Catalog, Listed, Query
from torchperfd_daemon.errors import UsageError
from torchperfd_daemon.service.permissions import Rights


def list_captures(
    catalog: Catalog, request: control_pb2.ListCapturesRequest, rights: Rights
) -> Iterator[control_pb2.ListedCapture]:
    """Yield the captures that match and that the caller may read, newest first.

    Raises:
        UsageError: There is no such state.
        TorchperfdError: The directory cannot be read.
    """
    try:
        state = CaptureState(request.state) if request.state else None
    except ValueError:
        raise UsageError(f"{request.state[:40]!r} is no state of a capture") from None
    query = Query(run=request.run, state=state, since=request.since, before=request.before or float("inf"))
    own = [
        listed
        for listed in catalog.list(query).captures
        if request.capture_id in ("", listed.record.capture_id)
        and rights.may_command_all(listed.record.users)
    ]
    uploads = catalog.uploads
    for listed in own[: request.limit or None]:
        yield _message(catalog, listed, total=len(own), uploads=uploads)


def pin(catalog: Catalog, request: control_pb2.PinCaptureRequest, rights: Rights) -> set[int]:
    """Protect a capture of the caller from removal, or no longer; return its users.

    Raises:
        NotAllowedError: The capture is of another user's run.
        TorchperfdError: There is no such capture, or nothing can be written there.
    """
    users = _checked_users(catalog, request.capture_id, rights)
    if request.pinned:
        catalog.pin(request.capture_id)
    else:
        catalog.unpin(request.capture_id)
    return users


def remove(catalog: Catalog, request: control_pb2.RemoveCaptureRequest, rights: Rights) -> set[int]:
    """Remove a capture of the caller, or only find out whether it may be removed; return its users.

    Raises:
        NotAllowedError: The capture is of another user's run.
        TorchperfdError: There is no such capture, or it is pinned or in progress.
    """
    users = _checked_users(catalog, request.capture_id, rights)
    if request.dry_run:
        catalog.check_removable(request.capture_id)
    else:
        catalog.remove(request.capture_id)
    return users


def _checked_users(catalog: Catalog, capture_id: str, rights: Rights) -> set[int]:
    users = catalog.get(capture_id).users
    rights.check(f"capture {capture_id[:80]}", users)
    return users


def _message(catalog: Catalog, listed: Listed, *, total: int, uploads: bool) -> control_pb2.ListedCapture:
    return control_pb2.ListedCapture(
        manifest=msgspec.json.encode(listed.record),
        disk_bytes=listed.bytes,
        pinned=listed.pinned,
        upload=listed.upload.value,
        uploads=uploads,
        total=total,
        analysed=catalog.has_analysis(listed.record.capture_id),
    )
