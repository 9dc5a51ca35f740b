"""What one would write by hand: times functions with ``torch.utils.benchmark``; stdin has what to time.

    python -m benchmarks.bench_agreement.by_hand FUNCTION...

Each line has a function, a number of threads and seconds; the answer is the median time of a call. All
functions are called once before, since the first call of one may change the speed of another.
"""

import sys

from benchmarks.bench_agreement import functions
from torch.utils.benchmark import Timer


def main() -> None:
    x = functions.data()
    for name in sys.argv[1:]:
        getattr(functions, name)(x)
    for name, threads, seconds in map(str.split, sys.stdin):
        timer = Timer(
            f"{name}(x)", globals={name: getattr(functions, name), "x": x}, num_threads=int(threads)
        )
        print(timer.blocked_autorange(min_run_time=float(seconds)).median, flush=True)


if __name__ == "__main__":
    main()
