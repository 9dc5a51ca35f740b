"""The scripts that Slurm runs around a job, with a real daemon, several users and fakes of its commands."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.node import ROOT, eventually
from tests.support.run_documents import PREDICTED, kept_run
from tests.support.shared_node import ADA, BOB, Shared, line

SCRIPTS = ROOT / "deploy" / "slurm"
JOB = "4711"
RUNS = ".local/state/torchperfd/runs"
HOSTILE = "x'\"; touch planted; $(touch planted) `touch planted`\n%s AdminComment=owned | & \\ \x1b[2J"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")

TRAIN = f"""
rank = Rank(SOCKET, RUN, slurm_job_id="{JOB}")
rank.receive()
kind = session_pb2.KindAccount(kind=1, steps=9, step_ns=9 * 10**9)
rank.say(account=session_pb2.Account(kinds=[kind], recorded_steps=9))
print("trained", flush=True)
sys.stdin.readline()
rank.leave()
print("left", flush=True)
"""


class Site(Shared):
    """A node of a Slurm cluster, the first of two."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.directory / "calls"
        self.home = self.directory / "home"
        self.marks = self.directory / "marks"
        self._add("scontrol", '[ "$1" = show ] && printf "n1\\nn2\\n"')
        self._add("sacctmgr", f'printf "%s\\0" "$@" >>{self.calls}')
        self._add("getent", f"echo x:x:0:0::{self.home}:/bin/sh")
        self._add("torchperfd", f'exec {sys.executable} -m torchperfd "$@"')

    def _add(self, name: str, body: str) -> None:
        program = self.directory / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)

    def environ(self, uid: int = ADA, **more: str) -> dict[str, str]:
        """Return what Slurm gives to its scripts, with this node's paths."""
        given = {
            "PATH": f"{self.directory}:/usr/bin:/bin",
            "TORCHPERFD_SOCKET": str(self.socket),
            "torchperfd": str(self.directory / "torchperfd"),
            "marks": str(self.marks),
            "socket": str(self.directory / "socket"),
            "SLURM_JOB_ID": JOB,
            "SLURM_JOB_UID": str(uid),
            "SLURM_JOB_NAME": HOSTILE,
            "SLURM_CLUSTER_NAME": "test",
            "SLURM_NODELIST": "n[1-2]",
            "SLURMD_NODENAME": "n1",
        }
        return given | more

    def script(self, name: str, *arguments: str, **more: Any) -> str:
        """Run a script of Slurm's to its end, within the time that it may take; return its output."""
        began = time.monotonic()
        done = subprocess.run(
            ["sh", str(SCRIPTS / name), *arguments],
            env=self.environ(**more),
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert arguments or time.monotonic() - began < 2, "the end of the job was delayed"
        assert not list(self.directory.rglob("planted"))
        return done.stdout

    def train_as(self, uid: int, run: str) -> None:
        """Let a rank of the job train until the daemon has its goodput, and leave."""
        with self.user(uid, f"RUN = {run!r}\n{TRAIN}") as rank:
            assert line(rank) == "trained"
            eventually(lambda: bool(self.json("goodput")["runs"]), 20, self.log)
            assert line(rank, "leave") == "left"

    def comment(self, **more: Any) -> str:
        """Do what the epilog leaves to a process of its own; return the job's comment, empty without one."""
        self.script("epilog.sh", "--comment", "1000", **more)
        return self.written()

    def written(self) -> str:
        """Return what sacctmgr was asked to write; empty without a call."""
        calls = self.calls.read_text() if self.calls.exists() else ""
        if not calls:
            return ""
        *words, comment, end = calls.split("\0")
        assert (words, end) == (["-i", "update", "job", "where", "cluster=test", f"jobid={JOB}", "set"], "")
        assert comment.startswith("AdminComment=torchperfd: ")
        return comment.removeprefix("AdminComment=torchperfd: ")

    def keep(
        self, document: Mapping[str, Any], uid: int = ADA, folder: str = ".local/state/torchperfd/runs"
    ) -> Path:
        """Keep a report for a user; return its folder."""
        runs = self.home / folder
        runs.mkdir(parents=True)
        (runs / f"slurm-{JOB}.json").write_text(json.dumps(document, separators=(",", ":")))
        for path in (self.home, *self.home.rglob("*")):
            os.chown(path, uid, uid)
            path.chmod(0o700 if path.is_dir() else 0o600)
        return runs


@pytest.fixture
def site() -> Iterator[Site]:
    with contextlib.closing(Site()) as made:
        yield made


def report(**verdict: Any) -> dict[str, Any]:
    return kept_run({"data": 0.055, "forward": 0.03}, run=f"slurm-{JOB}", verdict=verdict or None)


@pytest.mark.parametrize("name", ["prolog.sh", "epilog.sh", "task_prolog.sh"])
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_slurm_script_parses(shell: str, name: str) -> None:
    subprocess.run([shell, "-n", str(SCRIPTS / name)], check=True)


def test_epilog_writes_verdict_and_goodput(site: Site) -> None:
    site.start_shared()
    site.script("prolog.sh")
    assert (site.directory / "socket").is_dir(), "containers that mount it can start"
    site.keep(report(**PREDICTED))
    site.train_as(ADA, f"slurm-{JOB}")
    site.script("epilog.sh")
    eventually(lambda: bool(site.written()), 30, site.log)
    verdict, goodput = site.written().split("; ")
    assert verdict == "input-bound, 64% of the step"
    assert goodput.startswith("goodput ")
    assert goodput.endswith(" of rank time")
    assert not list(site.marks.iterdir()), "what the prolog noted is gone"


def test_epilog_without_report_asks_the_daemon(site: Site) -> None:
    site.start_shared()
    site.train_as(ADA, HOSTILE)
    verdict, goodput = site.comment().split("; ")
    assert (verdict, goodput[:8]) == ("not known", "goodput ")


def test_epilog_ignores_other_users_claim_to_the_job(site: Site) -> None:
    site.start_shared()
    site.train_as(BOB, f"slurm-{JOB}")
    assert site.comment() == ""


def test_epilog_quotes_what_a_report_contains(site: Site) -> None:
    site.keep(report(**PREDICTED | {"cause": HOSTILE, "rank": 0, "node": HOSTILE}))
    words = site.comment()
    assert len(words) <= 200
    assert not set(words) & set("'\"$`\\=|&\n\x1b")
    assert "touch planted" in words


def test_epilog_reads_with_the_users_rights_only(site: Site) -> None:
    """A link of the user's leads to a report that only root may read."""
    site.keep(report(**PREDICTED), uid=0, folder="secret/torchperfd/runs")
    site.home.chmod(0o755)
    (site.home / ".local").mkdir()
    (site.home / ".local" / "state").symlink_to(site.home / "secret")
    assert site.comment() == ""
    assert site.comment(uid=0) == "input-bound, 64% of the step"


def test_epilog_leaves_older_reports_alone(site: Site) -> None:
    runs = site.keep(report(**PREDICTED))
    os.utime(runs / f"slurm-{JOB}.json", (999, 999))
    assert site.comment() == ""


def test_epilog_with_a_hanging_daemon_has_the_report(site: Site) -> None:
    site.keep(report(**PREDICTED))
    daemon = site.start_daemon("--socket-mode", "666")
    daemon.send_signal(signal.SIGSTOP)
    try:
        assert site.comment() == "input-bound, 64% of the step"
    finally:
        daemon.send_signal(signal.SIGCONT)


def test_epilog_on_another_node_writes_nothing(site: Site) -> None:
    site.keep(report(**PREDICTED))
    assert site.comment(SLURMD_NODENAME="n2") == ""


@pytest.mark.parametrize("more", [{"torchperfd": "/nonexistent"}, {"SLURM_NODELIST": ""}, {}])
def test_epilog_that_knows_nothing_writes_nothing(site: Site, more: dict[str, str]) -> None:
    assert site.comment(**more) == ""


@pytest.mark.parametrize("more", [{}, {"SLURM_JOB_ID": "../x"}, {"SLURM_JOB_UID": ""}])
def test_epilog_of_a_job_without_prolog_does_nothing(site: Site, more: dict[str, str]) -> None:
    site.keep(report(**PREDICTED))
    site.script("epilog.sh", **more)
    assert not worker_of(site)


def test_epilog_ends_a_command_that_hangs(site: Site) -> None:
    site.script("prolog.sh")
    hang = site.directory / "hang"
    hang.write_text("#!/bin/sh\nexec sleep 600\n")
    hang.chmod(0o755)
    site.script("epilog.sh", torchperfd=str(hang), seconds="2")
    eventually(lambda: bool(worker_of(site)), 10, site.log)
    eventually(lambda: not worker_of(site), 20, site.log)
    assert site.written() == ""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.needs("slurmctld", "slurmd", "slurmdbd", "sacctmgr", "munged", "mariadbd", "ip")
def test_verdict_of_two_nodes_reaches_accounting() -> None:
    done = subprocess.run([ROOT / "tools" / "test_slurm.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def worker_of(site: Site) -> list[int]:
    """Return the processes that the epilog has left."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("marks") == str(site.marks):
                found.append(process.pid)
    return found


def test_task_prolog_names_run_and_job(site: Site) -> None:
    names = site.script("task_prolog.sh", SLURM_JOB_NAME="bert\nexport LD_PRELOAD=x").splitlines()
    assert names == [
        f"export TORCHPERFD_RUN=slurm-{JOB}",
        "export TORCHPERFD_JOB=bertexport LD_PRELOAD=x",
    ]
    assert site.script("task_prolog.sh", TORCHPERFD_RUN="mine", TORCHPERFD_JOB="mine") == ""
