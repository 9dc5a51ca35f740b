"""``client.capture(ranks="all")``: rank 0's script captures the whole job while it trains."""

import json
import re
from pathlib import Path
from typing import Final

from tests.support.node import Node, torchrun

SCRIPT: Final = """
import json, threading, time, torch, torch.distributed as dist
import torchperfd
client = torchperfd.attach()
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
while not client.connected:
    time.sleep(0.01)
dist.barrier()
waiting = captured = None
ended = torch.zeros(1)
while not ended:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    ended = torch.tensor([float(waiting is not None and not waiting.is_alive())])
    dist.all_reduce(ended)
    optimizer.step()
    time.sleep(0.005)
    if rank == 0 and waiting is None:
        captured = client.capture(steps=3, ranks="all")
        waiting = threading.Thread(target=captured.wait, args=(120,))
        waiting.start()
if rank == 0:
    paths = {number: str(path) for number, path in captured.paths.items()}
    print(json.dumps([captured.step_range, paths, captured.report().splitlines()[0]]))
else:
    try:
        client.capture(ranks="all")
    except torchperfd.CaptureError as error:
        print(json.dumps(str(error)))
dist.destroy_process_group()
"""


def test_rank_0_captures_the_whole_job_at_the_same_steps(node: Node, tmp_path: Path) -> None:
    script = tmp_path / "ordered.py"
    script.write_text(SCRIPT)
    node.start_daemon()
    job = (
        *torchrun(2),
        str(script),
    )
    with node.running(*job, TORCHPERFD_RUN="ordered") as process:
        output, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
    said = [json.loads(line) for line in output.splitlines()]
    [refused] = [line for line in said if isinstance(line, str)]
    assert refused.startswith("this is rank 1, and only rank 0 captures other ranks; call it there")
    [[steps, paths, report]] = [line for line in said if not isinstance(line, str)]
    assert sorted(paths) == ["0", "1"]
    for path in paths.values():
        found = re.findall(r'"name": "ProfilerStep#(\d+)"', Path(path).read_text())
        assert sorted({int(step) for step in found}) == list(range(*steps))
    assert report
    [listed] = node.json("captures", "list")["captures"]
    assert (listed["state"], listed["trigger"], listed["step_range"]) == ("complete", "script", steps)
