"""Two nodes whose runs end: the verdict is that of all ranks while the other node lives, else not known."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.test_fleet import Host, joined_hosts

pytestmark = [pytest.mark.slow, pytest.mark.needs("ip", "unshare")]

SCRIPT = """
import sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.set_num_threads(1)
slow, steps = int(sys.argv[1]), int(sys.argv[2])

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(32, 4)

    def forward(self, x):
        time.sleep(0.08 if dist.get_rank() == slow else 0.02)
        return self.linear(x)

model = DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(steps):
    optimizer.zero_grad()
    model(torch.randn(16, 32)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""
STEPS = 220
MAX_SECONDS = 240


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    yield from joined_hosts()


def run_both(hosts: list[Host], script: Path, slow: int, *, reachable: bool, options: str = "") -> list[str]:
    """Run the job on both hosts with embedded daemons; return what each side has written to stderr.

    Args:
        reachable: Whether the daemons know each other.
        options: Further options of ``torchperfd run``.
    """
    script.write_text(SCRIPT)
    peers = ",".join(host.peer for host in hosts)
    started = []
    for number, host in enumerate(hosts):
        other = hosts[1 - number]
        host.env |= {
            "TORCHPERFD_FLEET_ADDRESS": host.peer,
            "TORCHPERFD_FLEET_PEERS": peers if reachable else f"{host.peer},{other.address}:9",
            "TORCHPERFD_FLEET_TOKEN_FILE": str(host.token),
        }
        started.append(
            subprocess.Popen(
                host.inside(
                    *(
                        sys.executable,
                        "-m",
                        "torch.distributed.run",
                        "--nnodes",
                        "2",
                        "--nproc-per-node",
                        "2",
                    ),
                    *("--node-rank", str(number), "--master-addr", hosts[0].address),
                    *("--master-port", "29400", "-m", "torchperfd", "run", *options.split()),
                    *(str(script), str(slow), str(STEPS)),
                ),
                env=host.env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    return [process.communicate(timeout=MAX_SECONDS)[1] for process in started]


def kept(host: Host) -> Any:
    [listed] = json.loads(host.ask("runs", "--json").stdout)["runs"]
    shown = host.ask("runs", "show", listed["id"], "--json")
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout)["verdict"]


@pytest.mark.parametrize("slow", [3, 1])
def test_end_of_a_run_names_the_slow_rank_of_any_node(hosts: list[Host], tmp_path: Path, slow: int) -> None:
    here, _ = run_both(hosts, tmp_path / "pair.py", slow, reachable=True)
    assert "HEALTHY" not in here
    assert "SLOW RANK" in here, here
    assert f"rank {slow} on node-{1 + slow // 2}" in here
    verdict = kept(hosts[0])
    assert (verdict["cause"], verdict["rank"], verdict["unseen_ranks"]) == ("slow rank", slow, 0)


def test_end_of_a_run_with_an_unreachable_node_is_not_known(hosts: list[Host], tmp_path: Path) -> None:
    here, _ = run_both(hosts, tmp_path / "pair.py", 3, reachable=False)
    assert "? NOT KNOWN" in here, here
    verdict = kept(hosts[0])
    assert (verdict["cause"], verdict["unseen_ranks"]) == ("unknown", 2)
    assert "2 of the job's 4 ranks are on no node that answers" in verdict["evidence"]
    assert f"no answer from {hosts[1].address}:9" in verdict["evidence"]
