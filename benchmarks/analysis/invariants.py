"""Checks what must be true of the advice on every trace of a directory, and prints the advice.

    python -m benchmarks.analysis.invariants DIRECTORY [--limit FILES]

Idle time is no more than the recording, each saving and all together are no more than the step, no tool's own
frame is named, and every setting exists in the installed torch. The command fails if one of these is broken,
or if the analyser ends with anything but an answer or its own error. Files that are no traces are counted.
"""

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.support.advice_invariants import violations
from tests.support.advice_settings import unknown_names

from torchperfd.document.terminal import render
from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.advice import advice_document
from torchperfd_daemon.errors import TorchperfdError

_SUFFIXES: Final = (".json", ".json.gz")
_MAX_FILES: Final = 500


def main(arguments: Sequence[str] | None = None) -> int:
    """Check each trace and return 1 if any answer breaks an invariant."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.analysis.invariants", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--limit", type=int, default=_MAX_FILES, help="most files to read")
    options = parser.parse_args(arguments)
    paths = (path for path in sorted(options.directory.rglob("*")) if path.name.endswith(_SUFFIXES))
    counts, broken = Counter[str](), 0
    for path in itertools.islice(paths, options.limit):
        try:
            summary = analysis.summarise(analysis.load(path))
        except TorchperfdError as error:
            counts["no trace"] += 1
            print(f"{path}: {error}")
            continue
        counts["with advice" if summary.advice else "without advice"] += 1
        problems = [*violations(summary), *(p for a in summary.advice for p in unknown_names(a.setting))]
        broken += len(problems)
        print(f"{path}: {len(summary.advice)} pieces of advice, {len(problems)} broken invariants")
        print(render(advice_document(summary.advice)))
        for problem in problems:
            print(f"BROKEN: {problem}")
    print(f"{counts.total()} files: {dict(counts)}, {broken} broken invariants")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
