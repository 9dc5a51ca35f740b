"""Who a process is, from a scripted environment and a fake ``/proc``."""

import os
import platform
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from torchperfd.model.identity import Identity, read_identity, read_launch

SHORT = re.compile(r"train_digits-[0-9a-f]{8}")
STAT = (
    "4321 (python3) S 1 4321 4321 0 -1 4194304 1000 0 0 0 10 5 0 0 20 0 3 0 "
    "7654321 123456789 2000 18446744073709551615 1 1 0 0 0 0 0 16781312 134217730 0 0 0 17 1 0 0 0 0 0"
)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").touch()
    (tmp_path / "proc/self/stat").write_text(STAT)
    return tmp_path / "proc"


@pytest.fixture
def read(proc: Path, monkeypatch: pytest.MonkeyPatch) -> "Reader":
    monkeypatch.setattr(sys, "argv", ["/jobs/train_digits.py", "--epochs", "2"])
    return Reader(proc)


class Reader:
    def __init__(self, proc: Path) -> None:
        self.proc = proc

    def __call__(
        self, environ: Mapping[str, str] | None = None, *, run: str | None = None, job_name: str | None = None
    ) -> Identity:
        return read_identity(run=run, job_name=job_name, environ=environ or {}, proc=self.proc)


def test_unlaunched_process_is_rank_0_of_1_named_after_script(read: Reader) -> None:
    run = read().run
    assert SHORT.fullmatch(run)
    assert read() == Identity(
        run=run,
        rank=0,
        world_size=1,
        local_rank=0,
        node_rank=0,
        job_name="train_digits",
        script="train_digits.py",
        slurm_job_id="",
        pod_uid="",
        node=socket.gethostname(),
        pid=os.getpid(),
        pid_namespace=(read.proc / "self/ns/pid").stat().st_ino,
        process_start_ticks=7654321,
        python_version=platform.python_version(),
    )


TORCHRUN = {
    "RANK": "13",
    "LOCAL_RANK": "5",
    "WORLD_SIZE": "16",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "bert-17",
}


def test_torchrun_says_which_rank_it_is(read: Reader) -> None:
    identity = read(TORCHRUN)
    assert (identity.run, identity.rank, identity.world_size) == ("bert-17", 13, 16)
    assert (identity.local_rank, identity.node_rank) == (5, 1)


def test_ranks_of_several_nodes_agree_on_name_by_rendezvous(read: Reader) -> None:
    unnamed = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "2"}
    run = read(unnamed).run
    assert SHORT.fullmatch(run)
    others = {"RANK": "3", "LOCAL_RANK": "3", "GROUP_RANK": "0", "NODE_NAME": "another"}
    assert read({**unnamed, **others}).run == run
    assert read({**unnamed, "MASTER_PORT": "29501"}).run != run


def test_uuid_of_a_launcher_becomes_script_and_short_id(read: Reader) -> None:
    """The same on all ranks, and after an elastic restart, which changes only the count and the port."""
    launched = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "F50BA658-ca32-4ac8-9d27-b5ddb200a20b"}
    later = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "4711", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert read(launched).run == "train_digits-f50ba658"
    assert read({**launched, **later}).run == "train_digits-f50ba658"
    assert read({"POD_UID": "8f14e45f-ceea-467a-9575-25ffb2c1f6f5"}).run == "train_digits-8f14e45f"
    assert read({**launched, "TORCHPERFD_RUN": "bert"}).run == "bert"


def test_generated_names_differ_between_processes_and_boots(read: Reader) -> None:
    names = {read().run, read({"NODE_NAME": "n7"}).run}
    (read.proc / "self/stat").write_text(STAT.replace("7654321", "7654322"))
    names.add(read().run)
    (read.proc / "sys/kernel/random").mkdir(parents=True)
    (read.proc / "sys/kernel/random/boot_id").write_text("8f14e45f-ceea\n")
    names.add(read().run)
    assert len(names) == 4


def test_torchrun_default_run_name_is_ignored(read: Reader) -> None:
    """All such runs have it: the ranks of one agree on their launcher instead."""
    identity = read({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"})
    assert SHORT.fullmatch(identity.run)
    assert (
        read({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none", "RANK": "2", "LOCAL_RANK": "2"}).run == identity.run
    )


def test_slurm_says_which_rank_it_is(read: Reader) -> None:
    identity = read(
        {
            "SLURM_JOB_ID": "4242",
            "SLURM_PROCID": "3",
            "SLURM_NTASKS": "8",
            "SLURM_LOCALID": "1",
            "SLURM_NODEID": "1",
        }
    )
    assert (identity.run, identity.slurm_job_id) == ("4242", "4242")
    assert (identity.rank, identity.world_size) == (3, 8)
    assert (identity.local_rank, identity.node_rank) == (1, 1)


def test_torchrun_under_slurm_knows_its_ranks_better(read: Reader) -> None:
    slurm = {"SLURM_JOB_ID": "4242", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    identity = read({**slurm, **TORCHRUN, "TORCHELASTIC_RUN_ID": "none"})
    assert (identity.run, identity.rank, identity.world_size) == ("4242", 13, 16)
    assert identity.slurm_job_id == "4242"


def test_a_pod_has_its_uid_and_its_nodes_name(read: Reader) -> None:
    identity = read({"POD_UID": "8f14e45f-ceea", "NODE_NAME": "gpu-node-7"})
    assert (identity.run, identity.pod_uid, identity.node) == ("8f14e45f-ceea", "8f14e45f-ceea", "gpu-node-7")


@pytest.mark.parametrize(
    "launcher",
    [
        {"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "2"},
        # An operator that sets the variables of env:// itself.
        {"WORLD_SIZE": "2"},
    ],
    ids=["torchrun", "env"],
)
def test_job_of_two_pods_is_one_run(read: Reader, launcher: dict[str, str]) -> None:
    meeting = {**launcher, "MASTER_ADDR": "bert-master-0", "MASTER_PORT": "23456"}
    runs = {
        read({**meeting, "POD_UID": uid, "RANK": rank}).run for uid, rank in (("aaaa", "0"), ("bbbb", "1"))
    }
    assert len(runs) == 1
    assert SHORT.fullmatch(runs.pop())


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1", ""])
def test_loopback_rendezvous_does_not_name_a_run(read: Reader, address: str) -> None:
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "23456"}
    assert read({**meeting, "POD_UID": "aaaa"}).run == "aaaa"


def test_names_are_taken_in_the_order_of_how_deliberate_they_are(read: Reader) -> None:
    environ = {
        "TORCHPERFD_RUN": "from us",
        "TORCHELASTIC_RUN_ID": "from torchrun",
        "SLURM_JOB_ID": "from slurm",
        "POD_UID": "from kubernetes",
    }
    assert read(environ, run="from the call").run == "from the call"
    for name in list(environ):
        assert read(environ).run == environ.pop(name)
    assert read(environ).run.startswith("train_digits-")


def test_job_name_is_from_call_then_environment_then_script(read: Reader) -> None:
    assert read({"TORCHPERFD_JOB": "bert"}, job_name="gpt").job_name == "gpt"
    assert read({"TORCHPERFD_JOB": "bert"}).job_name == "bert"
    assert read().job_name == "train_digits"


@pytest.mark.parametrize("value", ["", "-1", "three", "1.5", " 2"])
def test_numbers_that_are_none_are_as_if_not_there(read: Reader, value: str) -> None:
    identity = read({"RANK": value, "SLURM_PROCID": "6", "WORLD_SIZE": value})
    assert (identity.rank, identity.world_size) == (6, 1)


@pytest.mark.parametrize(("argv", "script"), [([], "python"), ([""], "python"), (["-c"], "-c")])
def test_a_process_without_a_script_has_a_name_too(
    read: Reader, monkeypatch: pytest.MonkeyPatch, argv: list[str], script: str
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert (read().script, read().job_name) == (script, script)


@pytest.mark.parametrize("command", ["a b", "(sd-pam)", ") R 1 1", "x) S 0 (y", "line\nbreak", ""])
def test_odd_command_names_do_not_shift_the_start_time(read: Reader, command: str) -> None:
    (read.proc / "self/stat").write_text(STAT.replace("python3", command))
    assert read().process_start_ticks == 7654321


@pytest.mark.parametrize("stat", ["", "4321 (python3) S 1", "4321 (python3) " + "x " * 40])
def test_a_stat_that_cannot_be_read_leaves_zero(read: Reader, stat: str) -> None:
    (read.proc / "self/stat").write_text(stat)
    assert read().process_start_ticks == 0


def test_no_proc_at_all_leaves_zeros(tmp_path: Path) -> None:
    identity = read_identity(environ={}, proc=tmp_path / "nothing")
    assert (identity.pid_namespace, identity.process_start_ticks) == (0, 0)


def test_key_distinguishes_two_processes(read: Reader) -> None:
    identity = read({"NODE_NAME": "n7"})
    assert identity.key == f"n7-{identity.pid_namespace}-{os.getpid()}-7654321"


def test_the_real_proc_can_be_read() -> None:
    identity = read_identity(environ={})
    assert identity.pid_namespace == Path("/proc/self/ns/pid").stat().st_ino
    assert identity.process_start_ticks > 0


def test_lightning_ranks_are_numbered_from_the_first_node() -> None:
    launched = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"}
    assert read_identity(environ=launched).rank == 1
    assert read_identity(environ={**launched, "RANK": "5"}).rank == 5
    assert read_identity(environ={**launched, "NODE_RANK": "1"}).rank == 0


@pytest.mark.parametrize(
    ("argv", "original", "launch"),
    [
        (
            ["train.py", "--lr", "1"],
            ["python", "train.py", "--lr", "1"],
            ("train.py", "train", "train.py --lr 1"),
        ),
        (["/j/v2.a.py"], ["python", "-u", "/j/v2.a.py"], ("v2.a.py", "v2.a", "/j/v2.a.py")),
        (
            ["/j/train.py", "a b"],
            ["python", "-m", "pkg.train", "a b"],
            ("pkg.train", "pkg.train", "-m pkg.train 'a b'"),
        ),
        (
            ["pkg.train", "--x"],
            ["python", "-m", "torchperfd", "run", "--run", "a", "-m", "pkg.train", "--x"],
            ("pkg.train", "pkg.train", "-m pkg.train --x"),
        ),
        (
            ["main.py", "-m"],
            ["python", "bin/torchperfd", "run", "main.py", "-m"],
            ("main.py", "main", "main.py -m"),
        ),
        # Neither a changed sys.argv nor a spawned child has a command line of its own.
        (["/j/train.py", "other"], ["python", "train.py", "--lr", "1"], ("train.py", "train", "")),
        (
            ["/j/train.py"],
            ["python", "-c", "from multiprocessing.spawn import spawn_main"],
            ("train.py", "train", ""),
        ),
        ([], ["python"], ("python", "python", "")),
    ],
)
def test_launch_has_module_and_arguments(
    argv: list[str], original: list[str], launch: tuple[str, str, str]
) -> None:
    found = read_launch(argv, original)
    assert (found.script, found.stem, found.command) == launch


def test_module_names_its_runs(read: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/site/scripts/base_train.py", "--depth", "2"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "scripts.base_train", "--depth", "2"])
    identity = read()
    assert identity.run.startswith("scripts.base_train-")
    assert (identity.job_name, identity.script) == ("scripts.base_train", "scripts.base_train")
    assert identity.command == "-m scripts.base_train --depth 2"


def test_launch_of_a_notebook_is_named_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["/venv/lib/ipykernel_launcher.py", "-f", "kernel.json"]
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert read_launch(argv, ["python", "-m", *argv]).stem == "notebook"
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/ada/digits.ipynb")
    assert read_launch(argv, ["python", "-m", *argv]).stem == "digits"
