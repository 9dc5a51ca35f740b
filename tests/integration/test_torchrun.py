"""Several ranks, with the real torchrun and gloo."""

import json
from pathlib import Path

from tests.support.node import Node, eventually

EPOCHS = ("--ddp", "--epoch", "8", "--workers", "1")


def test_ps_shows_one_run_with_two_ranks_and_nothing_else(node: Node) -> None:
    node.start_daemon()
    with node.train(*EPOCHS, "--steps", "3200", ranks=2, options=()) as process:
        eventually(lambda: node.metric("torchperfd_clients") == 2, 60, node.log)
        eventually(lambda: (node.metric("torchperfd_train_steps_total{") or 0) > 20, 60, node.log)
        # Each rank reports once a second, in its own time.
        eventually(lambda: all(rank["steps"] for rank in node.json("ps")["runs"][0]["ranks"]), 10, node.log)
        (run,) = node.json("ps")["runs"]
        capture = node.json("capture", "--steps", "4")
        process.terminate()
        process.communicate(timeout=30)
    assert run["world_size"] == 2
    assert [rank["rank"] for rank in run["ranks"]] == [0, 1]
    assert len({rank["pid"] for rank in run["ranks"]}) == 2
    assert all(rank["steps"] for rank in run["ranks"])
    assert capture["state"] == "complete"
    assert [rank["state"] for rank in capture["ranks"]] == ["complete", "complete"]
    first, after = capture["step_range"]
    for rank in capture["ranks"]:
        text = Path(rank["path"]).read_text()
        assert all(f"ProfilerStep#{step}" in text for step in range(first, after))


def test_embedded_daemon_serves_both_ranks_and_rank_0_reports(node: Node, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ("--report", str(report))
    with node.train(*EPOCHS, "--steps", "80", ranks=2, options=options, TORCHPERFD_RUN="pair") as process:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    document = json.loads(report.read_text())
    assert document["run"] == "pair"
    assert [(rank["rank"], rank["train"]["steps"]) for rank in document["ranks"]] == [(0, 80), (1, 80)]
    assert errors.count("── torchperfd · run pair ──") == 1
    eventually(lambda: node.command("ps").returncode == 4, 10)
