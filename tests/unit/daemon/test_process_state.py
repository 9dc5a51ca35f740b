"""What the kernel says about a rank's process: running, stopped, traced or ended."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.unit.daemon.processes import HERE, process, start_ticks

from torchperfd_daemon.collectors.process import RankProcess
from torchperfd_daemon.service.rank_process import GoneError, StoppedError, check_running


def test_check_running_stopped_or_ended_process_raises() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        ticks = start_ticks(child.pid)
        check_running(process(child.pid))
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        with pytest.raises(StoppedError, match=f"kill -CONT {child.pid}"):
            check_running(process(child.pid))
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(GoneError):
            check_running(process(child.pid))
    with pytest.raises(GoneError):
        check_running(process(child.pid, ticks))
    check_running(process(child.pid, ticks, namespace=HERE + 1))


def test_check_running_traced_process_names_the_tracer(tmp_path: Path) -> None:
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").touch()
    (tmp_path / "70").mkdir()
    (tmp_path / "70/stat").write_text("70 (a) b) t " + " ".join(["0"] * 18 + ["9"] + ["0"] * 20))
    (tmp_path / "70/status").write_text("Name:\ta\nTracerPid:\t71\n")
    with pytest.raises(StoppedError, match="by a debugger, process 71"):
        check_running(RankProcess("r", 0, 70, (tmp_path / "self/ns/pid").stat().st_ino, 9), tmp_path)
