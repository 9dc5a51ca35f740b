"""The analyst: what it stores, what it refuses to touch, and that it never keeps the daemon waiting."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.as_user import USERS
from tests.support.node import eventually
from tests.support.served import GIVE_UP_S
from tests.unit.daemon import kept
from tests.unit.daemon.traces import document, event

from torchperfd_daemon.captures import low_priority
from torchperfd_daemon.captures.analysis_child import ChildFiles
from torchperfd_daemon.captures.analyst import AnalysisCounts, Analyst, RankShares, command_for
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState, RankTrace
from torchperfd_daemon.errors import TorchperfdError

ADA = USERS[0]
TRACE = document(
    [
        event("ProfilerStep#1", 0, 100_000, cat="user_annotation"),
        event("gemm", 0, 40_000, cat="kernel", thread=7),
        event("ncclDevKernel_AllReduce", 30_000, 60_000, cat="kernel", thread=8),
        event("Memcpy HtoD", 70_000, 80_000, cat="gpu_memcpy", thread=7),
        event("gemm", 90_000, 100_000, cat="kernel", thread=7),
    ]
).encode()


def saying(script: str) -> Any:
    """Return what makes a command of some lines of Python; the capture's id is its first argument."""
    return lambda files: [sys.executable, "-c", script, *files.folders]


def names(catalog: Catalog, capture_id: str) -> list[str]:
    return sorted(path.name for path in catalog.folder(capture_id).iterdir())


def run_until(analyst: Analyst, results: int) -> None:
    """Run an analyst on its thread until it has so many results."""
    analyst.start()
    eventually(lambda: sum(analyst.counts.results.values()) >= results, GIVE_UP_S)
    analyst.stop()


def test_a_capture_is_analysed_by_the_command_itself(catalog: Catalog) -> None:
    record = kept.add(catalog, "one", {0: TRACE})
    before = kept.disk_bytes(catalog.folder("one"))
    analyst = Analyst(catalog)
    analyst.analyse(record)
    stored = json.loads(catalog.analysis("one"))
    assert stored["schema"] == "torchperfd.analysis/1"
    assert "exposed communication 0.020 ms (20.0%)" in stored["text"]
    (shares,) = analyst.counts.newest["bert-17"]
    assert shares.rank == 0
    parts = (shares.compute, shares.exposed_comm, shares.exposed_memcpy, shares.idle)
    assert parts == pytest.approx((0.5, 0.2, 0.1, 0.2))
    assert names(catalog, "one") == ["analysis.json", "manifest.json", "rank0.json"]
    (listed,) = catalog.list().captures
    assert listed.bytes == kept.disk_bytes(catalog.folder("one")) > before


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import sys; print('{'); sys.exit('one\\nlast \\x1bwords')", "last words"),
        ("raise SystemExit(9)", "the analyser ended with 9"),
        ("print('no document')", "the analyser wrote no analysis"),
        ("pass", "the analyser wrote no analysis"),
    ],
)
def test_a_failure_is_one_line_and_leaves_nothing(catalog: Catalog, script: str, words: str) -> None:
    record = kept.add(catalog, "one")
    with pytest.raises(TorchperfdError, match=words) as caught:
        Analyst(catalog, saying(script)).analyse(record)
    assert "\n" not in str(caught.value)
    assert names(catalog, "one") == ["manifest.json", "rank0.json"]


def test_analysis_over_its_time_limit_is_killed_with_children(catalog: Catalog, tmp_path: Path) -> None:
    record = kept.add(catalog, "one")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    # Both hold the pipe open; it ends when neither is left.
    script = f"import os, time\nos.open({str(pipe)!r}, os.O_WRONLY)\nos.fork()\ntime.sleep(600)"
    with pytest.raises(TorchperfdError, match=r"more than 1 s"):
        Analyst(catalog, saying(script), timeout=1.0).analyse(record)
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_analysis_that_waits_is_ended_and_counted(catalog: Catalog, caplog: pytest.LogCaptureFixture) -> None:
    analyst = Analyst(catalog, saying("import time\ntime.sleep(600)"), max_idle=0.5)
    analyst.submit(kept.add(catalog, "one"))
    run_until(analyst, 1)
    assert analyst.counts.results == {"analysed": 0, "failed": 0, "stuck": 1, "dropped": 0}
    assert "capture one is not analysed: the analyser waited for 0 s without doing anything" in caplog.text


def test_analysis_that_computes_is_not_ended(catalog: Catalog) -> None:
    script = "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass\n"
    script += "print('{\"ranks\": []}')"
    Analyst(catalog, saying(script), max_idle=0.5).analyse(kept.add(catalog, "one"))
    assert catalog.has_analysis("one")


def test_analysis_reads_descriptors_whatever_becomes_of_names(catalog: Catalog, tmp_path: Path) -> None:
    record = kept.add(catalog, "one", {0: TRACE, 1: TRACE})
    (tmp_path / "secret").write_bytes(TRACE.replace(b"gemm", b"secret_kernel"))

    def swap(files: ChildFiles) -> list[str]:
        trace = catalog.folder("one") / "rank0.json"
        trace.unlink()
        trace.symlink_to(tmp_path / "secret")
        (catalog.folder("one") / "rank1.json").unlink()
        os.mkfifo(catalog.folder("one") / "rank1.json")
        return command_for(files)

    Analyst(catalog, swap).analyse(record)
    stored = catalog.analysis("one")
    assert b"gemm" in stored
    assert b"secret_kernel" not in stored
    assert len(json.loads(stored)["ranks"]) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a child as another user")
def test_analyser_is_the_captures_user_without_the_environment(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET", "secret")
    record = kept.add(catalog, "one")
    os.chown(catalog.folder("one") / "rank0.json", ADA, ADA)
    record.ranks[0].uid = ADA
    catalog.save(record)
    script = (
        "import json, os, sys\n"
        "from torchperfd_cli import main as cli\n"
        "from torchperfd_daemon.captures import low_priority\n"
        "def facts():\n"
        "    found = [os.getresuid(), os.getresgid(), os.getgroups(), 'AWS_SECRET' in os.environ]\n"
        "    print(json.dumps({'ranks': [], 'facts': found, 'trace': open('one/rank0.json').read()}))\n"
        "cli.main = facts\n"
        "user, _, group = sys.argv[1].removeprefix(low_priority.USER).partition(':')\n"
        "low_priority.run_as(int(user), int(group), sys.argv[2:])\n"
    )

    def command(files: ChildFiles) -> list[str]:
        return [sys.executable, "-c", script, *files.arguments(), *files.folders]

    Analyst(catalog, command).analyse(record)
    stored = json.loads(catalog.analysis("one"))
    assert stored["facts"] == [[ADA] * 3, [65_534] * 3, [], False]
    assert stored["trace"] == "{}", "what it may read it finds by the link"
    assert (catalog.folder("one") / "analysis.json").stat().st_uid == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a child as another user")
@pytest.mark.parametrize("ranks", [1, 2])
def test_capture_of_another_user_is_analysed_by_the_command(catalog: Catalog, ranks: int) -> None:
    record = kept.add(catalog, "one", dict.fromkeys(range(ranks), TRACE))
    for trace in record.ranks:
        os.chmod(catalog.folder("one") / trace.file, 0o600)
        os.chown(catalog.folder("one") / trace.file, ADA, ADA)
        trace.uid = ADA
    catalog.save(record)
    Analyst(catalog).analyse(record)
    stored = json.loads(catalog.analysis("one"))
    assert len(stored["ranks"]) == ranks
    assert "exposed communication 0.020 ms (20.0%)" in stored["text"]
    assert "rank 0: one/rank0.json" in stored["text"]


def test_captures_are_analysed_one_by_one_on_a_thread(catalog: Catalog) -> None:
    analyst = Analyst(catalog, saying("print('{\"ranks\": []}')"))
    catalog.on_ended = analyst.submit
    for capture_id in ("one", "two"):
        kept.add(catalog, capture_id)
    kept.add(catalog, "open", state=CaptureState.ARMED)
    run_until(analyst, 2)
    assert analyst.counts.results == {"analysed": 2, "failed": 0, "stuck": 0, "dropped": 0}
    assert [catalog.has_analysis(each) for each in ("one", "two", "open")] == [True, True, False]


def test_a_failure_of_one_is_a_count_and_the_next_is_analysed(
    catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    script = "import sys; sys.exit('bad luck') if sys.argv[1] == 'one' else print('{\"ranks\": []}')"
    analyst = Analyst(catalog, saying(script))
    for capture_id in ("one", "two"):
        analyst.submit(kept.add(catalog, capture_id))
    run_until(analyst, 2)
    assert analyst.counts.results == {"analysed": 1, "failed": 1, "stuck": 0, "dropped": 0}
    assert [record.message for record in caplog.records] == ["capture one is not analysed: bad luck"]


def test_too_many_are_dropped_and_counted(catalog: Catalog) -> None:
    analyst = Analyst(catalog)
    record = kept.add(catalog, "one")
    for _ in range(70):
        analyst.submit(record)
    assert analyst.counts.results["dropped"] == 6


@pytest.mark.parametrize("name", ["", "rank0.memory.pickle", "stacks.json"])
def test_what_has_no_trace_is_left_alone(catalog: Catalog, name: str) -> None:
    analyst = Analyst(catalog)
    ranks = [RankTrace(0, CaptureState.COMPLETE, "", name)]
    record = CaptureRecord("one", "bert-17", "command", 0.0, CaptureState.COMPLETE, ranks=ranks)
    for _ in range(70):
        analyst.submit(record)
    # None was queued, or the queue would have been full.
    assert analyst.counts.results["dropped"] == 0


def test_a_pipe_or_a_link_in_the_place_of_a_trace_is_refused(catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(TRACE)
    analyst = Analyst(catalog)
    for capture_id in ("pipe", "link"):
        record = kept.add(catalog, capture_id)
        trace = catalog.folder(capture_id) / "rank0.json"
        trace.unlink()
        if capture_id == "pipe":
            os.mkfifo(trace)
        else:
            trace.symlink_to(tmp_path / "secret")
        with pytest.raises(TorchperfdError, match="no readable file"):
            analyst.analyse(record)
        assert not catalog.has_analysis(capture_id)


def test_a_stopped_analyst_begins_nothing(catalog: Catalog) -> None:
    analyst = Analyst(catalog, saying("print('{\"ranks\": []}')"))
    record = kept.add(catalog, "one")
    analyst.submit(record)
    analyst.stop()
    analyst.run()
    assert not catalog.has_analysis("one")
    with pytest.raises(TorchperfdError, match="stopping"):
        analyst.analyse(record)


def test_only_the_newest_runs_are_remembered() -> None:
    counts = AnalysisCounts()
    shares = (RankShares(0, 1.0, 0.0, 0.0, 0.0),)
    for number in range(70):
        counts.remember(f"run{number}", shares)
    counts.remember("run6", shares)
    assert list(counts.newest) == [f"run{number}" for number in (*range(7, 70), 6)]


def test_lower_priority_limits_and_nices_the_process() -> None:
    script = (
        "import os, resource\nfrom torchperfd_daemon.captures import low_priority\n"
        "low_priority.lower_priority()\n"
        "print(os.nice(0), *(resource.getrlimit(what)[1] for what in"
        " (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE)))\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (5, 5))\nlow_priority.lower_priority()\n"
        "print(resource.getrlimit(resource.RLIMIT_CPU)[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = low_priority.MAX_MEMORY if hard == resource.RLIM_INFINITY else min(hard, low_priority.MAX_MEMORY)
    assert done.stdout.splitlines() == [
        f"19 {most} {low_priority.MAX_CPU_S} {low_priority.MAX_OUTPUT} 0",
        "5",
    ]
