"""A rank with steps of a millisecond: it reports every four seconds, and its end is noticed all the same."""

import itertools
import os
import signal
import time
from pathlib import Path

import pytest
from tests.support.node import eventually, new_node

pytestmark = pytest.mark.slow

SCRIPT = """
import sys, time, torch, torchperfd
from pathlib import Path

# A machine may be slower than the test expects, and ten thousand steps take their time.
torchperfd.link.outbox._FIRST_STEPS = 500
torchperfd.link.outbox.SHORT_STEP_S = 0.05
reports, report = [], torchperfd.link.wire.totals_to_message

def noted(*what):
    reports.append(time.time())
    Path(sys.argv[1]).write_text(" ".join(map(str, reports)))
    return report(*what)

torchperfd.link.wire.totals_to_message = noted
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

while True:
    # Steps of a third of a millisecond fill half of the buffer in three seconds, which makes one more report.
    time.sleep(0.002)
    optimizer.zero_grad()
    model(torch.ones(32, 64)).sum().backward()
    optimizer.step()
"""


@pytest.mark.needs("gcc")
def test_rank_with_short_steps_stop_is_found(tmp_path: Path) -> None:
    script, reports = tmp_path / "train.py", tmp_path / "reports"
    script.write_text(SCRIPT)

    def times() -> list[float]:
        return [float(time) for time in reports.read_text().split()] if reports.exists() else []

    def reports_seldom() -> bool:
        """Return whether the newest reports lie on the grid of four seconds."""
        newest = times()[-3:]
        return len(newest) == 3 and all(
            3 < later - earlier < 5.5 for earlier, later in itertools.pairwise(newest)
        )

    with new_node() as node:
        node.start_daemon()
        with node.train(str(reports), script=script):
            eventually(reports_seldom, 90, node.log)
            newest = node.metric("torchperfd_train_last_step_timestamp_seconds")
            assert newest is not None
            assert time.time() - newest < 7
            ((rank,),) = (run["ranks"] for run in node.json("ps")["runs"])
            os.kill(rank["pid"], signal.SIGSTOP)
            eventually(lambda: node.metric('torchperfd_train_verdict{cause="hang"') == 1, 60, node.log)
            (verdict,) = node.json("diagnose")["verdicts"]
            assert "rank 0 is stopped" in verdict["evidence"]
