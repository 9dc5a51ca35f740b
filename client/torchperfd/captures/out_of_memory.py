"""Out of memory: what the CUDA allocator holds when an allocation fails, as a capture of its own.

torch calls an observer when it has found no memory, before it raises. The exception is made afterwards and
by torch alone, so that the script sees what it would have seen.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchperfd.captures.files import CapturesDirectory
from torchperfd.captures.manager import analysis_of, load_options
from torchperfd.errors import CaptureError
from torchperfd.hooks import cuda
from torchperfd.model.identity import Identity
from torchperfd.safety.interrupts import is_from_script
from torchperfd.safety.logs import Faults, log
from torchperfd.v1.contract import new_capture_id

if TYPE_CHECKING:
    from torchperfd.captures.rank_files import RankFiles
    from torchperfd.v1 import control_pb2

TRIGGER: Final = "out of memory"

_ASK_S: Final = 1.0
"""Longest that the daemon is waited for."""
_HANDOVER_S: Final = 5.0
"""Longest wait for the service to begin to take the files."""
_SUMMARY_S: Final = 20.0
"""Longest that the summary may take: the script waits for its exception."""


class OutOfMemory:
    """Leaves a memory snapshot and its summary when the first allocation fails; later ones leave nothing.

    A script that tries batch sizes fails often, and each snapshot takes a moment.

    Args:
        whole_run: Returns what the daemon knows of all ranks within some seconds, None if it does not answer.
    """

    def __init__(
        self,
        directory: CapturesDirectory,
        identity: Identity,
        step: Callable[[], int],
        whole_run: "Callable[[float], control_pb2.GetRunResponse | None]",
        faults: Faults,
    ) -> None:
        self._directory = directory
        self._identity = identity
        self._step = step
        self._whole_run = whole_run
        self._faults = faults
        self._is_wanted = self._has_torch = self._is_watching = self._is_done = False

    def want(self) -> None:
        """Watch from now on, or once torch has been imported."""
        load_options()  # now: there is no memory left by then
        self._is_wanted = True
        self._watch()

    def torch_is_imported(self) -> None:
        """Watch if that is wanted."""
        self._has_torch = True
        self._watch()

    def end(self) -> None:
        """Leave nothing any more: the client is detached, but torch still calls the observer."""
        self._is_done = True
        if self._is_watching:
            cuda.forget_stacks()

    def _watch(self) -> None:
        if self._is_watching or not (self._is_wanted and self._has_torch):
            return
        self._is_watching = True
        try:
            cuda.observe_allocation_failures(self._observe)
        except Exception as error:
            if is_from_script(error):
                raise
            self._faults.note("out of memory", error)
            log.warning("nothing will be left when CUDA's memory runs out: %s", error)

    def _observe(self, device: int, wanted: int, total: int, free: int) -> None:
        """An allocation has failed; called by torch in the middle of it."""
        if self._is_done:
            return
        self._is_done = True
        try:
            self._leave_snapshot({"device": device, "wanted": wanted, "total": total, "free": free})
        except Exception as error:  # a full disk, no memory on the host either
            if is_from_script(error):
                raise
            self._faults.note("out of memory", error)
            log.warning("CUDA is out of memory, and no snapshot could be left: %s", error)

    def _leave_snapshot(self, failed: dict[str, int]) -> None:
        from torchperfd.captures.driver import MemoryTracer
        from torchperfd.captures.rank_files import NotWrittenError, RankFiles, rank_manifest
        from torchperfd.captures.state import CaptureOptions, CaptureOutcome, CaptureState
        from torchperfd.model.capture_options import CaptureKind

        capture_id = new_capture_id(time.time())
        folder, rank = self._directory.folder(capture_id), self._identity.rank
        files = RankFiles(folder, rank, CaptureKind.MEMORY, 0)
        snapshot = MemoryTracer(with_stack=False)
        snapshot.take()
        try:
            written = files.write_trace(snapshot, lambda: "")
        except NotWrittenError:
            files.remove_leftovers()
            raise
        state = CaptureState(CaptureOptions(steps=1, kind=CaptureKind.MEMORY))
        state.start_step = self._step()
        outcome = CaptureOutcome(
            ok=True, file=files.trace, bytes=written.bytes, sha256=written.sha256, start_step=state.start_step
        )
        ranks = self._ranks()
        manifest = rank_manifest(capture_id, TRIGGER, self._identity, state, outcome)
        files.write_manifest(manifest | {"failed_allocation": failed, "ranks": ranks})
        summary = self._summary(files, folder / files.trace, ranks)
        log.warning(
            "CUDA is out of memory: %.3f GB were wanted on device %d; see %s",
            failed["wanted"] / 1e9,
            failed["device"],
            folder / summary,
        )
        if self._directory.handover is not None:
            try:
                further = [summary] if summary != files.trace else []
                files.hand_over(lambda: self._directory.handover, further, turn_seconds=_HANDOVER_S)
            except NotWrittenError as error:
                log.warning("capture %s: %s", capture_id, error)

    def _summary(self, files: "RankFiles", path: Path, ranks: list[dict[str, int]]) -> str:
        """Write the summary; return its name, or the snapshot's where there is none."""
        try:
            text = analysis_of(path, _SUMMARY_S)
            if ranks:
                text += "\nall ranks at that moment, in GB\nRANK  ALLOCATED  RESERVED   PEAK\n"
                text += "".join(
                    "{rank:>4}  {:>9.2f}  {:>8.2f}  {:>5.2f}\n".format(
                        *(rank[name] / 1e9 for name in ("allocated", "reserved", "peak")), rank=rank["rank"]
                    )
                    for rank in ranks
                )
            return files.write_summary(text)
        except (CaptureError, OSError) as error:
            log.warning("the memory snapshot has no summary: %s", error)
            return files.trace

    def _ranks(self) -> list[dict[str, int]]:
        """Return the CUDA memory of all ranks at this moment, as far as the daemon knows."""
        run = self._whole_run(_ASK_S)
        return [
            {
                "rank": rank.identity.rank,
                "allocated": rank.account.cuda.allocated_bytes,
                "reserved": rank.account.cuda.reserved_bytes,
                "peak": rank.account.cuda.peak_bytes,
            }
            for rank in (run.ranks if run is not None else ())
            if rank.account.HasField("cuda")
        ]
