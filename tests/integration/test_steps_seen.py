"""A rank with steps of a millisecond, which reports seldom: the daemon sees it go on, slow down and stop."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from tests.node import eventually, new_node

SCRIPT = """
import sys, time, torch, torchperfd
from pathlib import Path

# A machine may be faster or slower than the test expects, and ten thousand steps take their time.
torchperfd.pump._ENOUGH_STEPS = 500
torchperfd.pump._SHORT_STEPS_S = (0.0, 0.05)
word, told_of = Path(sys.argv[1]), Path(sys.argv[2])
reports, report = [], torchperfd.wire.account_message

def noted(*what):
    reports.append(time.monotonic())
    told_of.write_text(" ".join(map(str, reports)))
    return report(*what)

torchperfd.wire.account_message = noted
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

for step in range(10**9):
    optimizer.zero_grad()
    model(torch.ones(32, 64)).sum().backward()
    optimizer.step()
    if step % 50 == 0:
        told = word.read_text()
    if told == "slow":
        time.sleep(0.002)
"""


class Reports:
    """When the rank has reported."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @property
    def times(self) -> list[float]:
        return [float(time) for time in self._file.read_text().split()] if self._file.exists() else []

    def since(self, moment: float) -> int:
        return sum(time >= moment for time in self.times)

    def have_ceased(self, seconds: float) -> bool:
        """Return whether the newest one is so long ago."""
        return bool(self.times) and time.monotonic() - self.times[-1] > seconds


@pytest.mark.needs("gcc")
def test_steps_that_are_reported_seldom_are_seen_all_the_same(tmp_path: Path) -> None:
    script, word, reports = tmp_path / "train.py", tmp_path / "word", Reports(tmp_path / "reports")
    script.write_text(SCRIPT)
    word.write_text("go")
    command = (sys.executable, "-m", "torchperfd", "run", str(script), str(word), str(tmp_path / "reports"))
    with new_node() as node:
        node.start_daemon()
        with node.running(*command):
            # Whoever looks has it report first, and sees the newest step.
            eventually(lambda: reports.have_ceased(6), 90, node.log)
            asked = time.monotonic()
            newest = node.metric("torchperfd_train_last_step_timestamp_seconds")
            assert newest is not None
            assert time.time() - newest < 4
            assert reports.since(asked) == 1
            eventually(lambda: reports.have_ceased(4), 60, node.log)
            asked = time.monotonic()
            ((rank,),) = (run["ranks"] for run in node.json("ps")["runs"])
            assert reports.since(asked) == 1
            # Nobody looks, and yet it is noticed that steps have become longer.
            eventually(lambda: reports.have_ceased(4), 60, node.log)
            asked = time.monotonic()
            word.write_text("slow")
            eventually(lambda: reports.since(asked) >= 3, 60, node.log)
            newest_three = reports.times[-3:]
            assert newest_three[-1] - newest_three[0] < 8
            os.kill(rank["pid"], signal.SIGSTOP)
            eventually(lambda: node.metric('torchperfd_train_verdict{cause="hang"') == 1, 60, node.log)
            (verdict,) = node.json("diagnose")["verdicts"]
            assert "rank 0 is stopped" in verdict["evidence"]
