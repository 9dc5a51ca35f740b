"""The actions of triggers: ordinary captures, and stacks that are written like a capture."""

import hashlib
import io
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Final

from torchperfd._version import __version__
from torchperfd.v1.contract import new_capture_id
from torchperfd_daemon.captures import (
    CaptureRecord,
    CaptureState,
    Catalog,
    Coordinator,
    Participant,
    RankTrace,
)
from torchperfd_daemon.captures import folder as capture_folder
from torchperfd_daemon.captures.manifest import CaptureOptions, first_reason, overall_state
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError, explained
from torchperfd_daemon.stacks import RankStacks, merge
from torchperfd_daemon.stacks.report import render_text, to_dict

TEXT_FILE: Final = "stacks.txt"
JSON_FILE: Final = "stacks.json"
_STACKS_S: Final = 10.0


class Actions:
    """Carries out the actions of rules.

    Args:
        participants: Returns the connected ranks of a run.
        stacks: Yields the stacks of a run's ranks, waiting up to so many seconds for each.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        catalog: Catalog,
        participants: Callable[[str], Sequence[Participant]],
        stacks: Callable[[str, float], AsyncIterator[RankStacks]],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._coordinator = coordinator
        self._catalog = catalog
        self._participants = participants
        self._stacks = stacks
        self._wall = wall

    async def capture(
        self, trigger: str, run: str, ranks: Collection[int], options: CaptureOptions, timeout: float
    ) -> CaptureRecord:
        """Capture some ranks of a run, and return the record of the capture.

        Raises:
            BusyError: A capture of the run is in progress.
            TorchperfdError: None of the ranks is connected, or nothing can be written.
        """
        chosen = [each for each in self._participants(run) if each.rank in ranks]
        if not chosen:
            raise NoSuchTargetError(f"no chosen rank of run {run} is connected")
        stream = self._coordinator.capture(run, chosen, options, timeout, trigger=trigger)
        record: CaptureRecord | None = None
        async with aclosing(stream) as changes:  # type: ignore[type-var] # an async generator is what it is
            async for progress in changes:
                record = progress.record
        if record is None:
            raise TorchperfdError("the capture ended without a result")
        return record

    async def stacks(self, trigger: str, run: str) -> CaptureRecord:
        """Write the stacks of all ranks of a run, and return the record with their manifest.

        Raises:
            TorchperfdError: The run has no ranks here, or nothing can be written.
        """
        asked_at = self._wall()
        stacks = [rank async for rank in self._stacks(run, _STACKS_S)]
        if not stacks:
            raise NoSuchTargetError(f"no rank of run {run} is on this node")
        stacks.sort(key=lambda rank: rank.rank)
        record = self._record(trigger, run, asked_at, stacks)
        merged = merge(stacks)
        text = io.StringIO()
        render_text(run, stacks, merged, text)
        document = json.dumps(to_dict(run, stacks, merged, ())).encode() + b"\n"
        path = self._catalog.create(record.capture_id)
        _write(path, {TEXT_FILE: text.getvalue().encode(errors="replace"), JSON_FILE: document})
        # One file contains all ranks. It is listed once, so that sums over ranks are right.
        first = next((trace for trace in record.ranks if trace.state is CaptureState.COMPLETE), None)
        if first is not None:
            first.file, first.bytes = JSON_FILE, len(document)
            first.sha256 = hashlib.sha256(document).hexdigest()
        record.ended_at = self._wall()
        self._catalog.save(record)
        self._coordinator.counts.count(record, record.ended_at)
        return record

    def _record(self, trigger: str, run: str, asked_at: float, stacks: Sequence[RankStacks]) -> CaptureRecord:
        ranks = [
            RankTrace(
                rank.rank,
                CaptureState.COMPLETE if rank.outcome.has_stacks else CaptureState.FAILED,
                "" if rank.outcome.has_stacks else f"{rank.outcome.value}: {rank.reason}",
                node=rank.node,
                pid=rank.pid,
            )
            for rank in stacks
        ]
        return CaptureRecord(
            capture_id=new_capture_id(asked_at),
            run=run,
            trigger=trigger,
            requested_at=asked_at,
            state=overall_state(ranks),
            reason=first_reason(ranks),
            options=CaptureOptions(steps=0),
            ranks=ranks,
            world_size=max(rank.world_size for rank in stacks),
            daemon_version=__version__,
        )


def _write(path: Path, files: dict[str, bytes]) -> None:
    """Create files in a capture's folder, never through an existing name, since other users may write there.

    Raises:
        TorchperfdError: They cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with explained(f"cannot write to {path}", "look at its disk"), capture_folder.opened(path) as held:
        for name, content in files.items():
            with open(os.open(name, flags, 0o644, dir_fd=held), "wb") as file:  # noqa: PTH123
                file.write(content)


def timeout_of(options: CaptureOptions, step_seconds: float) -> float:
    """Return the timeout of a capture in seconds: 60 plus three times the expected time of its steps."""
    return 60.0 + 3.0 * (options.steps + 2) * step_seconds
