"""The captures of a caller: those requested now, and those kept in the daemon's captures directory."""

import asyncio
import functools
import hashlib
import io
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import BinaryIO, Final

import msgspec

from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon.captures.attempt import When
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.captures.folder import ANALYSIS
from torchperfd_daemon.captures.index import Listed, Query
from torchperfd_daemon.captures.manifest import FILE_NAME, CaptureState
from torchperfd_daemon.captures.rank_attempts import Participant
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError, UsageError
from torchperfd_daemon.service import translate
from torchperfd_daemon.service.permissions import AuditLine, Rights
from torchperfd_daemon.service.rank_session import Session
from torchperfd_daemon.service.targets import PeerDirectory, Targets, whole_job
from torchperfd_daemon.store.store import Store


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
        yield _listed_message(catalog, listed, total=len(own), uploads=uploads)


def pin(catalog: Catalog, request: control_pb2.PinCaptureRequest, rights: Rights) -> set[int]:
    """Protect a capture of the caller from removal, or no longer; return its users.

    Raises:
        NotAllowedError: The capture is of another user's run.
        TorchperfdError: There is no such capture, or nothing can be written there.
    """
    users = _checked_users(catalog, request.capture_id, rights)
    catalog.pin(request.capture_id, pinned=request.pinned)
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


def _listed_message(
    catalog: Catalog, listed: Listed, *, total: int, uploads: bool
) -> control_pb2.ListedCapture:
    return control_pb2.ListedCapture(
        manifest=msgspec.json.encode(listed.record),
        disk_bytes=listed.bytes,
        pinned=listed.pinned,
        upload=listed.upload.value,
        uploads=uploads,
        total=total,
        analysed=catalog.has_analysis(listed.record.capture_id),
    )


_PIECE_BYTES: Final = 1024 * 1024


async def download_pieces(
    catalog: Catalog, request: control_pb2.DownloadRequest, rights: Rights, line: AuditLine
) -> AsyncIterator[control_pb2.DownloadPiece]:
    """Yield a file of a capture from the offset asked for to its end.

    The manifest is built from the capture's record, so that there is one even where only ranks wrote
    theirs. Every other file is one that the manifest names.

    Raises:
        NotAllowedError: The capture is of another user's run.
        NoSuchTargetError: There is no such capture, or it has no such file.
        UsageError: The offset is beyond the file's end.
        TorchperfdError: The file is another user's.
    """
    # On a thread: reading may wait for a disk, and hashing takes a millisecond per piece.
    file, users = await asyncio.to_thread(_open_file, catalog, request.capture_id, request.file, rights)
    try:
        size = file.seek(0, os.SEEK_END)
        if request.offset > size:
            raise UsageError(
                f"{request.file[:80]!r} has {size} bytes, fewer than the offset {request.offset}",
                "delete the partial file and download it anew",
            )
        file.seek(request.offset)
        line.allowed(users)
        digest = hashlib.sha256()
        while data := await asyncio.to_thread(_next_piece, file, digest):
            yield control_pb2.DownloadPiece(data=data, size=size)
        yield control_pb2.DownloadPiece(size=size, sha256=digest.hexdigest())
    finally:
        file.close()


def _open_file(catalog: Catalog, capture_id: str, name: str, rights: Rights) -> tuple[BinaryIO, set[int]]:
    record = catalog.get(capture_id)
    # Manifests of older versions name no users: only administrators may download those captures.
    rights.check(f"capture {capture_id}", record.users)
    if name == FILE_NAME:
        return io.BytesIO(record.encode()), record.users
    if name == ANALYSIS:
        return io.BytesIO(catalog.analysis(capture_id)), record.users
    if not name or name not in {trace.file for trace in record.ranks}:
        raise NoSuchTargetError(
            f"capture {capture_id} has no file {name[:80]!r}", "its manifest names those it has"
        )
    return catalog.open_own(capture_id, name), record.users


def _next_piece(file: BinaryIO, digest: "hashlib._Hash") -> bytes:
    data = file.read(_PIECE_BYTES)
    digest.update(data)
    return data


_TIMEOUT_S: Final = 60.0
_NOT_CONNECTED: Final = "is not connected to this daemon; ranks on other nodes need --job and --fleet-peers"


class Captures:
    """Conducts the captures that callers request.

    Args:
        sessions_of: Returns the connected ranks of a run.
    """

    def __init__(
        self,
        store: Store,
        sessions_of: Callable[[str], Iterable[Session]],
        coordinator: Coordinator,
        others: PeerDirectory,
    ) -> None:
        self._store = store
        self._sessions_of = sessions_of
        self._coordinator = coordinator
        self._others = others

    async def of_fleet(
        self, request: control_pb2.CaptureRequest, targets: Targets, rights: Rights, line: AuditLine
    ) -> AsyncIterator[control_pb2.CaptureProgress]:
        """Capture a run with its ranks on all nodes.

        Raises:
            UsageError: All runs are asked for.
        """
        if request.all_runs:
            raise UsageError("the captures of all runs are of one node", "leave --all or --fleet out")

        def own() -> dict[str, list[Participant]]:
            return {run: [*self._sessions_of(run)] for run in targets.runs(request.job)}

        wanted = rights.own_name(request.run, self._store.runs())
        async with self._others.gather(
            wanted, request.ranks, own, rights.may_command, request.job
        ) as gathered:
            async for message in self._conduct(request, gathered.run, lambda: gathered.participants, line):
                message.unreachable.extend(gathered.unreachable)
                for rank in message.ranks:
                    node = gathered.elsewhere.get(rank.rank, "")
                    rank.node = translate.node_of_trace(message.directory, rank.file, node)
                yield message

    def of_run(
        self, request: control_pb2.CaptureRequest, targets: Targets, line: AuditLine
    ) -> AsyncIterator[control_pb2.CaptureProgress]:
        """Return the capture of the one run that is meant, ranks of this node only."""
        run = targets.run(request.run, request.job)
        return self._conduct(request, run, functools.partial(self._here, run, request, targets), line)

    async def _conduct(
        self,
        request: control_pb2.CaptureRequest,
        run: str,
        choose_ranks: Callable[[], list[Participant]],
        line: AuditLine,
    ) -> AsyncIterator[control_pb2.CaptureProgress]:
        async for progress in self._coordinator.capture(
            run,
            choose_ranks(),
            translate.capture_options_from_message(request.options),
            request.timeout_seconds or _TIMEOUT_S,
            when=When(request.at_step if request.HasField("at_step") else None, request.duration_seconds),
            queue=request.queue,
            choose_again=choose_ranks,
        ):
            line.allowed(progress.record.users, progress.record.capture_id)
            yield translate.progress_to_message(progress)

    def _here(self, run: str, request: control_pb2.CaptureRequest, targets: Targets) -> list[Participant]:
        """Return the ranks to capture: by default all of the job, so that a missing one fails by name."""
        sessions = targets.ranks(run, request.ranks)
        if request.options.kind == session_pb2.CAPTURE_KIND_MEMORY:
            for session in sessions:
                if not session.supports_kinds:
                    raise TorchperfdError(
                        f"the torchperfd of rank {session.rank} makes traces only",
                        "install the same version on both sides",
                    )
        found: dict[int, Participant] = {session.rank: session for session in sessions}
        wanted = [*found] if request.ranks else ()
        return whole_job(run, wanted, found, _NOT_CONNECTED, self._coordinator)

    def of_each_run(
        self, request: control_pb2.CaptureRequest, targets: Targets, rights: Rights
    ) -> list[AsyncIterator[control_pb2.CaptureProgress]]:
        """Return a capture of each run; what one of them cannot do ends itself only.

        Each is a line of its own in the audit log.

        Raises:
            NoSuchTargetError: There is no run.
        """

        async def tried(run: str) -> AsyncIterator[control_pb2.CaptureProgress]:
            line = rights.request("capture", f"all ranks of run {run}")
            try:
                ranks = functools.partial(self._here, run, request, targets)
                async for message in self._conduct(request, run, ranks, line):
                    yield message
            except TorchperfdError as error:
                line.failed(error)
                yield control_pb2.CaptureProgress(
                    run=run, state=control_pb2.CAPTURE_STATE_FAILED, reason=str(error)
                )

        runs = targets.runs()
        if not runs:
            targets.run("")
        return [tried(run) for run in runs]
