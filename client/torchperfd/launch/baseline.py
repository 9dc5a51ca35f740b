"""The comparison of a run with a baseline, at its end."""

import json
import os
from collections.abc import Callable
from typing import Any, Final

from torchperfd.errors import TorchperfdError
from torchperfd.launch.keeping_options import KeepingOptions
from torchperfd.runs.errors import RunFileError
from torchperfd.runs.record import RunRecord, read_record
from torchperfd.runs.store import RunStore, read_file
from torchperfd.v1 import contract

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
    from torchperfd.runs.comparison import compare_runs
    from torchperfd.runs.comparison_text import comparison_text

    try:
        comparison = compare_runs(baseline, read_record(json.dumps(document).encode(), "this run"))
    except TorchperfdError as error:
        write(f"torchperfd: no comparison with the baseline: {error}\n")
        return 0 if fail_above is None else 1
    text = comparison_text(comparison, colour=colour, width=width)
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
