"""Compare ``torchperfd bench compare`` with ``torch.utils.benchmark`` used by hand.

    python -m benchmarks.bench_agreement [--seconds 0.2] [--repeats 2] [--threads 1,2] [--only FUNCTION]

For each pair of functions: the comparison, as the command makes it, and beside each of its rounds the same
functions timed by hand, in processes of their own. The ratio by hand is the geometric mean of theirs. Exits 1
if fewer than 95 % of these ratios lie within the comparison's own interval.
"""

import argparse
import contextlib
import itertools
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from benchmarks.bench_agreement.functions import PAIRS

from torchperfd_cli.bench.functions import Comparison, bench_functions

_MODULE: Final = "benchmarks.bench_agreement.functions"
_ROUNDS: Final = 5
_LEAST: Final = 0.95
# By hand in so many processes for each round: the ratio by hand is to have less noise than the interval has
# width.
_PROCESSES: Final = 2
_ROW: Final = "{:<18} {:>7} {:>7}  {:<14} {:>7}  {}"


@contextlib.contextmanager
def by_hand_process(names: Sequence[str]) -> Iterator[Callable[[str, int, float], float]]:
    """Keep a process in which functions are timed by hand.

    Yields:
        What returns the median time of a call of a function, with so many threads, timed for so many seconds.
    """
    command = [sys.executable, "-m", "benchmarks.bench_agreement.by_hand", *names]
    # Its end is that of its stdin.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def time(name: str, threads: int, seconds: float) -> float:
            assert process.stdin
            assert process.stdout
            process.stdin.write(f"{name} {threads} {seconds}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            if not answer:
                raise RuntimeError("the process that times by hand ended early")
            return float(answer)

        yield time


def compare(pair: tuple[str, str], threads: Sequence[int], seconds: float) -> list[tuple[Comparison, float]]:
    """Return how the second function compares with the first, and the ratio by hand, by threads."""
    by_hand: list[list[float]] = [[] for _ in threads]
    count = itertools.count()

    def before_a_measurement(_name: str) -> None:
        if next(count) % (len(pair) * len(threads)):
            return  # in the midst of a round
        for process_number in range(_PROCESSES):
            order = pair[:: -1 if process_number % 2 else 1]
            with by_hand_process(order) as time:
                for ratios, number in zip(by_hand, threads, strict=True):
                    timed = {function: time(function, number, seconds) for function in order}
                    ratios.append(timed[pair[1]] / timed[pair[0]])

    found = bench_functions(
        [f"{_MODULE}:{name}" for name in pair],
        setup=f"{_MODULE}:data",
        parameters={},
        threads=threads,
        seconds=seconds,
        rounds=_ROUNDS,
        timeout=60.0,
        progress=before_a_measurement,
    )
    return [(found.compare(1, row), statistics.geometric_mean(ratios)) for row, ratios in enumerate(by_hand)]


def main() -> int:
    """Print a table; return 1 where too few ratios lie within their intervals."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.2, help="of each measurement of the comparison")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--only", choices=[other for _, other in PAIRS], help="the second one of a pair")
    options = parser.parse_args()
    print(_ROW.format("function", "threads", "ratio", "interval", "by hand", ""))
    threads = [int(word) for word in options.threads.split(",")]
    inside = total = 0
    for _ in range(options.repeats):
        for pair in (each for each in PAIRS if options.only in (None, each[1])):
            for number, (found, by_hand) in zip(
                threads, compare(pair, threads, options.seconds), strict=True
            ):
                is_inside = found.low <= by_hand <= found.high
                inside, total = inside + is_inside, total + 1
                figures = (f"{found.ratio:.3f}", f"{found.low:.3f} to {found.high:.3f}", f"{by_hand:.3f}")
                print(_ROW.format(pair[1], number, *figures, "" if is_inside else "outside"), flush=True)
    print(f"{inside} of {total} ratios by hand lie within the interval ({inside / total:.0%})")
    if inside < _LEAST * total:
        print(f"NOT MET: fewer than {_LEAST:.0%}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
