"""Compare the search of ``bench dataloader`` with a full grid.

    python -m benchmarks.loader_search [--seconds 1] [--rounds 3] [--only NAME]

For each loader: the search, then a grid of workers and prefetch factors, each setting for as long as in the
search, round by round. The best setting of the grid and the recommended one are then measured again in turn,
because the best of many noisy figures is too high. Two ceilings of a loader with a step stand beside a longer
replay by hand: the one that the command shows, by its own replay, and the one that is predicted from steps
with batches just drawn, as ``client.bench()`` does in a training process. Exits 1 if a recommendation is over
5 % slower than the best, if the search takes more than a quarter of the time of the grid, or if a ceiling is
off by more than 5 %.
"""

import argparse
import itertools
import statistics
import sys
import time
from typing import Final

from benchmarks.judge import exit_code
from benchmarks.loader_search import loaders

from torchperfd_cli.bench.loader_bench import LoaderBench, bench_loader
from torchperfd_cli.bench.loader_process import LoaderProcess, LoaderSetting, Speed
from torchperfd_cli.bench.search import search_space

_LOADERS: Final = ("decode_bound", "collate_bound", "tiny_items", "decode_bound_training")
_PREFETCH: Final = (2, 4, 8)
_DUELS: Final = 7
_SLOWER: Final = 0.05
_TIME: Final = 0.25
_CEILING: Final = 0.05
_KEPT: Final = 8
_REPLAYS: Final = 9
_REPLAY_S: Final = 0.5


def main() -> int:
    """Print a table; return 1 where a bound does not hold."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=_LOADERS)
    options = parser.parse_args()
    complaints = []
    for name in (options.only,) if options.only else _LOADERS:
        target = f"benchmarks.loader_search.loaders:{name}"
        with LoaderProcess(target, options.seconds, 60.0) as measurer:
            measurer.facts()  # the imports are in neither time
            found = bench_loader(target, measurer, search_space, lambda *_: None)
            complaints += _compare_with_grid(name, found, measurer, options.rounds)
    return exit_code(complaints)


def _compare_with_grid(name: str, found: LoaderBench, measurer: LoaderProcess, rounds: int) -> list[str]:
    most = search_space(found.facts).most_workers
    own = found.facts.current
    grid = [LoaderSetting(0, own.batch_size)]
    grid += [
        LoaderSetting(workers, own.batch_size, prefetch)
        for workers in range(1, most + 1)
        for prefetch in _PREFETCH
    ]
    began = time.monotonic()
    figures: dict[LoaderSetting, list[float]] = {setting: [] for setting in grid}
    for _ in range(rounds):
        for setting in grid:
            figures[setting].append(_throughput(measurer, setting))
    took = time.monotonic() - began
    best = max(grid, key=lambda setting: statistics.median(figures[setting]))
    recommended = found.recommended
    assert recommended is not None
    duels = [
        (_throughput(measurer, recommended), _throughput(measurer, best))
        for _ in range(_DUELS if recommended != best else 0)
    ]
    ratio = statistics.median(ours / theirs for ours, theirs in duels) if duels else 1.0
    share = found.took_seconds / took
    tried = f"{len(found.outcomes)} of {len(grid)} settings"
    print(f"{name}: {tried}, {found.took_seconds:.1f} of {took:.1f} s ({share:.0%})")
    print(f"  recommended {_name(recommended)}, best of the grid {_name(best)}: {ratio:.3f} of its speed")
    complaints = []
    if ratio < 1 - _SLOWER:
        complaints.append(f"{name}: the recommended setting has {ratio:.3f} of the best one's speed")
    if share > _TIME:
        complaints.append(f"{name}: the search took {share:.0%} of the grid's time")
    rest = found.rest
    if rest is not None and rest.predicted_seconds is not None:
        by_hand = _replay_by_hand(name)
        shown, predicted = rest.seconds / by_hand - 1, rest.predicted_seconds / by_hand - 1
        print(
            f"  ceiling {by_hand * 1e3:.2f} ms a step by hand; shown {shown:+.1%}, predicted {predicted:+.1%}"
        )
        for words, error in (("shown", shown), ("predicted", predicted)):
            if abs(error) > _CEILING:
                complaints.append(f"{name}: the ceiling that is {words} is off by {error:+.1%}")
    sys.stdout.flush()
    return complaints


def _replay_by_hand(name: str) -> float:
    """Return the seconds of a step with batches in memory."""
    loader, step = getattr(loaders, name)()
    batches = list(itertools.islice(loader, _KEPT))
    rounds = []
    for _ in range(_REPLAYS):
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < _REPLAY_S:
            step(batches[count % _KEPT])
            count += 1
        rounds.append((time.perf_counter() - began) / count)
    return statistics.median(rounds)


def _throughput(measurer: LoaderProcess, setting: LoaderSetting) -> float:
    outcome = measurer.measure(setting)
    return outcome.samples_per_second if isinstance(outcome, Speed) else 0.0


def _name(setting: LoaderSetting) -> str:
    return f"{setting.workers} workers, {setting.prefetch} ahead" if setting.workers else "no workers"


if __name__ == "__main__":
    sys.exit(main())
