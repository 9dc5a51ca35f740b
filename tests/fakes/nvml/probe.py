"""Sample scenario after scenario with the real collector, a second apart, and print each as JSON."""

import json
import os
import sys
from pathlib import Path

from torchperfd_daemon.collectors.base import CollectorUnavailableError
from torchperfd_daemon.collectors.nvml import NvmlCollector
from torchperfd_daemon.collectors.process import RankProcess
from torchperfd_daemon.collectors.procfs import parse_stat, read


def main(paths: list[str]) -> None:
    live = Path(os.environ["FAKE_NVML_SCENARIO"])
    seconds = 0.0
    # The test itself passes for a rank: its pid is the one that a scenario can know.
    test = os.getppid()
    rank = RankProcess("test", 0, test, 0, parse_stat(read(f"/proc/{test}/stat")).start_ticks)
    collector = NvmlCollector(lambda: [rank], clock=lambda: seconds, wall=lambda: 1_700_000_000 + seconds)
    for path in paths:
        Path(path).replace(live)
        try:
            families = {family.name: family.samples for family in collector.sample()}
        except CollectorUnavailableError as error:
            families = {f"unavailable: {error}": []}
        print(json.dumps(families))
        seconds += 1


if __name__ == "__main__":
    main(sys.argv[1:])
