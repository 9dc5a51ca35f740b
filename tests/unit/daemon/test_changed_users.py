"""A process that has changed users since it connected is not read, and loses its session."""

import asyncio
import logging
from pathlib import Path

import pytest
from tests.unit.daemon.host_tree import HostTree, busy_host

from torchperfd_daemon.collectors import process_usage
from torchperfd_daemon.collectors.cgroup import CgroupCollector
from torchperfd_daemon.collectors.kubelet import PodResources
from torchperfd_daemon.collectors.process import RankProcess, has_users, is_here
from torchperfd_daemon.collectors.process_usage import ProcessCollector
from torchperfd_daemon.collectors.procfs import read
from torchperfd_daemon.doctor.facts import ReportedFacts
from torchperfd_daemon.doctor.reading import read_facts
from torchperfd_daemon.goodput.tracker import exit_of
from torchperfd_daemon.ownership import OwnershipCollector
from torchperfd_daemon.rpc.callers import Caller
from torchperfd_daemon.service.rank_process import ChangedUsersError, check_running, describe_wait
from torchperfd_daemon.service.rank_session import Session, UserWatch
from torchperfd_daemon.service.stuck_rank_stacks import read_stacks_by_py_spy, request_stacks_by_signal
from torchperfd_daemon.store.model import RankIdentity
from torchperfd_daemon.store.store import Rank

SET_USER_ID = "1000 0 0 0"


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    made = busy_host(tmp_path)
    made.write("proc/100/environ", "SLURM_JOB_ID=77\0")
    made.write("proc/100/wchan", "hrtimer_nanosleep")
    return made


def change_users(tree: HostTree) -> None:
    path = tree.proc / "100/status"
    path.write_text(path.read_text().replace("1000 1000 1000 1000", SET_USER_ID))


@pytest.mark.parametrize("changed", range(4))
@pytest.mark.parametrize("whose", ["users", "groups"])
def test_has_users_compares_each_of_them(tree: HostTree, whose: str, changed: int) -> None:
    mine = {"users": "1000", "groups": "100"}
    assert has_users(tree.proc, 100, 1000, 100)
    ids = [mine[whose]] * 4
    ids[changed] = "0"
    tree.add_process(100, **{whose: "\t".join(ids)})  # type: ignore[arg-type]
    assert not has_users(tree.proc, 100, 1000, 100)
    assert has_users(tree.proc, 100, None, None)
    assert not is_here(tree.proc, tree.rank(100))


def test_has_users_of_an_unreadable_status_is_false(tree: HostTree) -> None:
    tree.write("proc/100/status", "Name:\tpython\n")
    assert not has_users(tree.proc, 100, 1000, 100)


def test_collectors_read_nothing_of_changed_users(tree: HostTree) -> None:
    rank = tree.rank(100)
    collectors = (
        ProcessCollector(lambda: [rank], tree.proc, tree.sys),
        CgroupCollector(lambda: [rank], tree.proc, tree.sys / "fs/cgroup"),
    )
    assert all(any(family.samples for family in each.sample()) for each in collectors)
    change_users(tree)
    assert not any(family.samples for family in collectors[1].sample())
    [resident] = [each for each in collectors[0].sample() if each.name == "process_resident_memory_bytes"]
    assert resident.samples == []


def test_process_totals_of_changed_users_are_dropped(tree: HostTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process changes users between the first check and the reading."""

    def changing(path: str | Path) -> str:
        if str(path).endswith("101/io"):
            change_users(tree)
        return read(path)

    tree.add_process(101, 100)
    monkeypatch.setattr(process_usage, "read", changing)
    collector = ProcessCollector(lambda: [tree.rank(100)], tree.proc, tree.sys)
    assert not any(family.samples for family in collector.sample())


def test_owner_of_changed_users_is_not_read(tree: HostTree) -> None:
    rank = tree.rank(100)
    identity = RankIdentity(rank.run, 0, pid=100, pid_namespace=rank.pid_namespace, process_start_ticks=500)
    for changes, job in ((False, "77"), (True, "")):
        if changes:
            change_users(tree)
        collector = OwnershipCollector(lambda: [rank], tuple, PodResources(Path("/nowhere")), tree.proc)
        collector.sample()
        assert collector.of(identity).slurm_job_id == job


def test_doctor_skips_changed_users(tree: HostTree) -> None:
    ranks = {tree.rank(100): ReportedFacts(None, None)}
    assert read_facts(ranks, tree.proc, tree.sys).ranks
    change_users(tree)
    assert read_facts(ranks, tree.proc, tree.sys).ranks == ()


def test_check_running_of_changed_users_raises(tree: HostTree) -> None:
    check_running(tree.rank(100), tree.proc)
    assert describe_wait(tree.rank(100), tree.proc)
    change_users(tree)
    with pytest.raises(ChangedUsersError, match="has changed users since it connected"):
        check_running(tree.rank(100), tree.proc)
    assert describe_wait(tree.rank(100), tree.proc) == ""


def write_program(directory: Path, script: str) -> Path:
    path = directory / "py-spy"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_py_spy_is_not_started_on_changed_users(tree: HostTree, tmp_path: Path) -> None:
    program = write_program(tmp_path, f"touch {tmp_path}/started")
    change_users(tree)
    with pytest.raises(ChangedUsersError):
        asyncio.run(read_stacks_by_py_spy(tree.rank(100), 20, program, tree.proc))
    with pytest.raises(ChangedUsersError):
        asyncio.run(request_stacks_by_signal(tree.rank(100), 1, tree.proc))
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("s/^Uid:.*/Uid: 1000 0 0 0/ status", "has changed users"),
        ("s/99 0 0$/99 0 0 0 0 7/ stat", "has begun another program"),
    ],
)
def test_py_spy_output_of_changed_users_is_dropped(
    tree: HostTree, tmp_path: Path, change: str, reason: str
) -> None:
    expression, file = change.rsplit(" ", 1)
    program = write_program(tmp_path, f"sed -i '{expression}' {tree.proc}/100/{file}; echo '[]'")
    with pytest.raises(Exception, match=reason):
        asyncio.run(read_stacks_by_py_spy(tree.rank(100), 20, program, tree.proc))


async def test_exit_of_changed_users_is_not_awaited(tree: HostTree) -> None:
    assert exit_of(RankProcess("r", 0, 1, 0, 0, uid=4242), lambda: 1) is None


async def test_user_watch_ends_the_session_and_logs_once(
    tree: HostTree, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(RankIdentity("bert", 3), 0.0)
    changed = Session(rank, caller=Caller(1000, 100, 500, gid=100))
    unknown = Session(rank)
    ended = Session(rank, caller=Caller(1000, 101, 500, gid=100))
    watch = UserWatch(lambda: [changed, unknown, ended], tree.proc)
    with caplog.at_level(logging.WARNING, "torchperfd.access"):
        watch.check()
        assert changed.ended == ""
        change_users(tree)
        changed.handler = asyncio.create_task(asyncio.sleep(60))
        for _ in range(3):
            watch.check()
        with pytest.raises(asyncio.CancelledError):
            await changed.handler
    assert (unknown.ended, ended.ended) == ("", "")
    [message] = caplog.messages
    assert message == (
        "rank 3 of run bert, uid 1000 (pid 100): the process has changed users since it connected;"
        " its session is ended"
    )
