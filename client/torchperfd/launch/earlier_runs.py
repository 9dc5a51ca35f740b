"""Comparisons of a run with earlier runs of the same script, and with a baseline that the user names.

What a run has executed is read at its end, on a thread of its own, to find the earlier runs.
"""

import hashlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from torchperfd.errors import TorchperfdError
from torchperfd.launch.options import KeepingOptions
from torchperfd.report.previous_runs import MAX_BYTES, outcome_of, script_digest, script_marker
from torchperfd.report.promise import PromiseOutcome
from torchperfd.report.record import RunFileError, RunRecord, read_record, record_of
from torchperfd.report.store import RunStore, read_file
from torchperfd.v1 import contract

if TYPE_CHECKING:
    from torchperfd.report.rank import RankReport


SLOWER: Final = 7
"""Exit code of a run that is slower than its baseline by more than was allowed."""
UNSEEN: Final = 5
"""Exit code of a run that is not, as far as its ranks were seen, and some were not."""


def read_baseline(options: KeepingOptions) -> RunRecord:
    """Read the run to compare with: a file, or a kept run by a prefix of its id.

    Raises:
        TorchperfdError: It is missing, ambiguous or damaged.
    """
    if os.path.exists(options.baseline):  # noqa: PTH110 - no pathlib in a training process
        return read_file(options.baseline)
    store = RunStore(options.directory or contract.user_runs_dir())
    try:
        return store.read(store.whole_id(options.baseline))
    except OSError as error:
        raise RunFileError(f"the kept runs cannot be read: {error}") from error


def compare_with_baseline(
    baseline: RunRecord,
    document: dict[str, Any],
    fail_above: float | None,
    write: Callable[[str], object],
    *,
    colour: bool = False,
    width: int | None = None,
) -> int:
    """Print how a run compares with its baseline.

    Args:
        baseline: Run A.
        document: Run B, of schema ``torchperfd.run/1``.
        fail_above: See :class:`KeepingOptions`.
        write: Takes the text.
        colour: Whether the text has colours.
        width: Columns of the terminal; None if the text is not for one.

    Returns:
        The exit code: 0; 7 where the step is slower by more than is allowed; 5 where that is not known of all
        ranks; 1 where it cannot be judged.
    """
    from torchperfd.document.terminal import Page, render
    from torchperfd.report.comparison import compare_runs
    from torchperfd.report.previous_runs import people_document

    try:
        comparison = compare_runs(baseline, read_record(json.dumps(document).encode(), "this run"))
    except TorchperfdError as error:
        write(f"torchperfd: no comparison with the baseline: {error}\n")
        return 0 if fail_above is None else 1
    text = render(people_document(comparison), Page(width, colour=colour))
    write(f"\n── torchperfd · compared with the baseline, A ──\n{text}\n")
    if fail_above is None:
        return 0
    if not comparison.is_slower_than(fail_above):
        if not comparison.unseen:
            return 0
        write(f"torchperfd: whether the step is slower is not known: {comparison.unseen}\n")
        return UNSEEN
    write(f"torchperfd: the step is slower than the baseline's by more than {100 * fail_above:g} %\n")
    return SLOWER


MAX_CANDIDATES: Final = 8
"""Earlier runs of the script that are read whole."""
_MAX_WAIT_S: Final = 10.0
_MAX_FILES: Final = 512
_MAX_SOURCE_BYTES: Final = 16 << 20
_DIGITS: Final = 16
_FEW_DIGITS: Final = 4
"""Of arguments, which may hold secrets: enough to notice a change, too few to find out what they were."""
_OUR_CODE_DIRECTORY: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
_LIBRARY_DIRECTORY: Final = os.path.dirname(os.__file__)  # noqa: PTH120
_GENERATED_MODULES: Final = ("torch.", "triton.")
"""Modules that compilation writes to a cache have such names."""
_INSTALLED_DIRECTORIES: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


class EarlierRuns:
    """Reads them on its thread, and compares. A disk that hangs costs the comparison, and no more.

    Args:
        options: Where runs are kept.
        script: Resolved path of the script.
        arguments: Of the script.
        began: When the run began, Unix seconds.
    """

    def __init__(
        self, options: KeepingOptions, script: str, arguments: tuple[str, ...], began: float
    ) -> None:
        self._store = RunStore(options.directory or contract.user_runs_dir())
        self._script = script
        self._arguments = arguments
        self._began = began
        self._source: dict[str, Any] | None = None
        self._document: dict[str, Any] = {}
        self._has_source = threading.Event()
        self._is_complete = threading.Event()
        self._outcome: PromiseOutcome | None = None
        self._thread = threading.Thread(target=self._read, name="torchperfd-earlier-runs", daemon=True)
        self._thread.start()

    def add_to(self, document: dict[str, Any], own: "RankReport", seconds: float) -> PromiseOutcome | None:
        """Add what the run has executed, its settings, and the outcome of a promise to its document.

        Args:
            document: Of schema ``torchperfd.run/1``, otherwise complete.
            own: Report of this rank.
            seconds: For which the reading may be waited for.

        Returns:
            The outcome; None without one, and where reading has taken longer.
        """
        deadline = time.monotonic() + max(0.0, seconds)
        self._has_source.wait(max(0.0, seconds))
        source = self._source
        self._document = document | {"source": source, "settings": settings_of(own)}
        self._is_complete.set()
        if source is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        outcome = None if self._thread.is_alive() else self._outcome
        document["source"], document["settings"] = source, self._document["settings"]
        document["promise"] = None if outcome is None else outcome.to_dict()
        return outcome

    def _read(self) -> None:
        with suppress(Exception):
            self._source = source_document(self._script, self._arguments, self._began)
            self._has_source.set()
            records = self._records()
            # Most often the newest one decides: it is read while the run's own report is made.
            newest = [*itertools.islice(records, 1)]
            if newest and self._is_complete.wait(_MAX_WAIT_S):
                self._outcome = outcome_of(record_of(self._document), itertools.chain(newest, records))

    def _records(self) -> Iterator[tuple[str, RunRecord]]:
        marker = script_marker(self._script)
        for run_id, content in self._store.newest_with(marker, MAX_CANDIDATES, MAX_BYTES):
            with suppress(TorchperfdError):
                yield run_id, read_record(content, run_id)


def source_document(script: str, arguments: tuple[str, ...], began: float) -> dict[str, Any]:
    """Return digests of what this process has executed; ``code`` is null where a file has changed meanwhile.

    Args:
        script: Resolved path of the script.
        arguments: Of the script.
        began: When the run began, Unix seconds.
    """
    return {
        "path": script_digest(script),
        "code": _code_digest(script, began),
        "arguments": _digest("\0".join(arguments).encode("utf-8", "surrogateescape"))[:_FEW_DIGITS],
    }


def settings_of(report: "RankReport") -> dict[str, int]:
    """Return the settings of a rank's loader, as far as they are known."""
    loader = report.totals.loader
    if loader is None:
        return {}
    size = {"batch_size": loader.batch_size} if loader.batch_size else {}
    return {"num_workers": loader.workers} | size


def main_file() -> str:
    """Return the resolved path of the module that runs as ``__main__``; empty if unknown."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.realpath(file) if isinstance(file, str) else ""


def _code_digest(script: str, began: float) -> str | None:
    """Return a digest of the script and the modules that are neither installed nor ours.

    Returns:
        None where a file was written after the run began, so that what was imported is not known, and of too
        many or too large files.
    """
    files = sorted({script, *_own_modules()})
    if len(files) > _MAX_FILES:
        return None
    digest, left = hashlib.sha256(), _MAX_SOURCE_BYTES
    for path in files:
        try:
            with open(path, "rb") as file:  # noqa: PTH123 - no pathlib in a training process
                status = os.fstat(file.fileno())
                content = file.read(left + 1)
        except OSError:
            return None
        left -= len(content)
        if left < 0 or status.st_mtime >= began:
            return None
        digest.update(f"{path}\0{len(content)}\0".encode("utf-8", "surrogateescape"))
        digest.update(content)
    return digest.hexdigest()[:_DIGITS]


def _own_modules() -> list[str]:
    found = []
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(path, str) and not name.startswith(_GENERATED_MODULES) and not _is_installed(path):
            found.append(path)
    return found


def _is_installed(path: str) -> bool:
    # A built-in module may have another name in the place of a path.
    if not os.path.isabs(path):  # noqa: PTH117
        return True
    return path.startswith((_OUR_CODE_DIRECTORY + os.sep, _LIBRARY_DIRECTORY + os.sep)) or any(
        each in path for each in _INSTALLED_DIRECTORIES
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
