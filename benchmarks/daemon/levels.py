"""What a metrics page costs at each level: ``python -m benchmarks.daemon.levels [--ranks 64]``.

The ranks have reported what those of the other benchmarks report, and their process is this one, so that they
have the series of a process as well. Printed are the CPU time of a page (median of interleaved rounds), its
series, and those of a rank. Exits 1 when the level ``essential`` leaves more than half of the time, or of the
series of a rank.
"""

import argparse
import os
import re
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.daemon.rank import Script
from benchmarks.judge import exit_code

from torchperfd_daemon.collectors.base import Sampler
from torchperfd_daemon.collectors.cgroup import CgroupCollector
from torchperfd_daemon.collectors.process_usage import ProcessCollector
from torchperfd_daemon.config.options import ESSENTIAL, FULL
from torchperfd_daemon.goodput.tracker import process_of
from torchperfd_daemon.metrics.page import DEFAULT_SERIES, MetricsPage, SeriesCap, by_age, node_metrics
from torchperfd_daemon.metrics.training import TrainingMetrics
from torchperfd_daemon.service import translate, translate_diagnosis
from torchperfd_daemon.store.model import RankIdentity, State
from torchperfd_daemon.store.store import Store

MAX_PART: Final = 0.5
_ROUNDS: Final = 20
_STEP_NS: Final = 100_000_000
_OF_A_RANK: Final = re.compile(rb"[{,]rank=\"0\"")


def store_of(ranks: int) -> Store:
    """Return a store in which each rank has reported ten steps."""
    store = Store()
    for number in range(ranks):
        rank = store.join(RankIdentity("bench", number, ranks, pid=os.getpid()))
        rank.state = State.TRAINING
        steps, account = Script(number).report(10, _STEP_NS).bundle.messages
        store.add_steps(rank, translate.training_steps_from_message(steps.steps))
        rank.totals = translate_diagnosis.totals_from_message(account.account)
    return store


def page_of(store: Store, samplers: list[Sampler], *, essential_only: bool) -> MetricsPage:
    cap = SeriesCap(DEFAULT_SERIES, lambda: by_age(store))
    training = TrainingMetrics(store, cap=cap, essential_only=essential_only)
    return MetricsPage(
        [training.families, partial(node_metrics, samplers)], cap, essential_only=essential_only
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=64, help="number of ranks")
    ranks: int = parser.parse_args().ranks
    store = store_of(ranks)
    collectors = [
        kind(lambda: map(process_of, store.ranks())) for kind in (ProcessCollector, CgroupCollector)
    ]
    samplers = [Sampler(collector, 1.0) for collector in collectors]
    for sampler in samplers:
        sampler.sample_once()
    pages = {
        level: page_of(store, samplers, essential_only=level == ESSENTIAL) for level in (FULL, ESSENTIAL)
    }
    spent: dict[str, list[float]] = {level: [] for level in pages}
    for _ in range(_ROUNDS):
        for level, page in pages.items():
            began = time.process_time()
            page.render("")
            spent[level].append(time.process_time() - began)
    print(f"{ranks} ranks, load {Path('/proc/loadavg').read_text().split()[0]}")
    figures = []
    for level, page in pages.items():
        lines = [line for line in page.render("")[0].splitlines() if not line.startswith(b"#")]
        figures.append(
            (statistics.median(spent[level]), sum(bool(_OF_A_RANK.search(line)) for line in lines))
        )
        seconds, of_rank = figures[-1]
        print(f"{level:9}: {seconds * 1e3:.1f} ms of CPU, {len(lines):,} series, {of_rank} of a rank")
    wrong = [
        f"essential leaves {small / whole:.0%} of {name}, limit {MAX_PART:.0%}"
        for name, whole, small in zip(("the time", "a rank's series"), *figures, strict=True)
        if small > MAX_PART * whole
    ]
    return exit_code(wrong)


if __name__ == "__main__":
    sys.exit(main())
