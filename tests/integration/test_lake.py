"""The lake of real daemons: one that a job brings along, and a service whose store is away at first."""

import socket
import time
from pathlib import Path

import pytest
from tests.support.node import Node, eventually
from tests.support.run_documents import differing

from torchperfd_daemon.lake.journal import FOLDER, Journal, Marked

pytestmark = pytest.mark.slow
pytest.importorskip("duckdb")


def objects(lake: Path, table: str) -> list[Path]:
    return [path for path in lake.rglob("*-*.*") if f"table={table}" in str(path)]


def test_job_without_service_writes_lake_at_its_end(node: Node) -> None:
    lake = node.directory / "lake"
    lake.mkdir()
    node.env |= {"TORCHPERFD_LAKE": lake.as_uri(), "XDG_CACHE_HOME": str(node.directory / "cache")}
    with node.train("--steps", "40", TORCHPERFD_RUN="alone") as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    for table in ("runs", "goodput", "steps"):
        eventually(lambda table=table: objects(lake, table), 30)  # type: ignore[misc]
    [run] = node.json("history", "recent_runs")["rows"]
    assert (run["run"], run["endings"], run["most_steps"]) == ("alone", "finished", 40)
    [listed] = node.json("runs", "--lake", lake.as_uri())["runs"]
    assert (listed["run"], listed["exit_state"], listed["steps"]) == ("alone", "finished", 40)
    heads, row = node.command("runs", "--lake", lake.as_uri()).stdout.splitlines()
    assert heads.split()[:4] == ["RUN", "OWNER", "WHEN", "RANKS"]
    assert row.startswith("alone ")
    [found] = node.json("goodput", "--lake", lake.as_uri())["runs"]
    assert found["run"] == "alone"
    [steps] = node.json("history", "SELECT sum(steps) AS steps FROM steps")["rows"]
    # The first step begins before the client is connected, and may be in no second.
    assert steps["steps"] in (39, 40)


def test_service_sends_later_what_store_did_not_take(node: Node) -> None:
    lake = node.directory / "lake"
    journal = Journal(node.captures / FOLDER, socket.gethostname())
    journal.append(time.time(), lambda _: Marked([("runs", {"run": "late"})]))
    journal.close()
    node.start_daemon("--lake", lake.as_uri(), "--lake-cluster", "east")
    failures = 'torchperfd_background_failures_total{worker="lake"}'
    eventually(lambda: node.metric(failures), 30, node.log)
    assert node.metric("torchperfd_lake_pending_rows") == 1
    lake.mkdir()
    node.stop_daemon()
    [written] = objects(lake, "runs")
    assert written.parent.name == "cluster=east"


# The lake leaves out scripts, which are their users' own. It knows a run from its first step on, and how many
# CPUs a rank may use.
APART = ("/script", "/started_seconds", "/environment/cpus")


def test_compare_of_lake_equals_that_of_kept_runs(node: Node) -> None:
    lake = node.directory / "lake"
    lake.mkdir()
    node.env |= {"XDG_CACHE_HOME": str(node.directory / "cache")}
    node.start_daemon("--lake", lake.as_uri())
    for name, pause in (("first", "0.01"), ("second", "0.03")):
        trains = ("--ddp", "--steps", "60", "--pause", pause)
        with node.train(*trains, ranks=2, TORCHPERFD_RUN=name) as process:
            _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    node.stop_daemon()

    def both_arrived() -> bool:
        listed = node.json("runs", "--lake", lake.as_uri())["runs"]
        return {run["run"] for run in listed} == {"first", "second"}

    # Each may come in an object of its own.
    eventually(both_arrived, 30)
    kept = node.json("compare", "first", "second")
    found = node.json("compare", "--lake", lake.as_uri(), "fir", "second")
    apart = {side + name for side in ("/before", "/after") for name in APART}
    assert differing(found, kept) <= apart
    assert kept["before"]["world_size"] == 2
