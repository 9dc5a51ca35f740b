"""The wheel, in an environment without torch: the daemon and the analyser must do without."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.node import ROOT, Node, eventually, free_port


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(directory), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (path,) = directory.glob("*.whl")
    return path


def test_the_wheel_holds_both_packages_and_the_generated_code(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {
        "torchperfd/__init__.py",
        "torchperfd/py.typed",
        "torchperfd/v1/session_pb2.py",
        "torchperfd_daemon/server.py",
        "torchperfd_daemon/py.typed",
    } <= names
    assert not any(name.startswith(("tests/", "benchmarks/", "examples/")) for name in names)


def test_it_serves_and_analyses_without_torch(wheel: Path, tmp_path: Path, node: Node) -> None:
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = environment / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "-q", str(wheel)], check=True, capture_output=True)
    probe = subprocess.run([str(python), "-c", "import torch"], capture_output=True, check=False)
    assert probe.returncode == 1, "torch came with the wheel"

    command = str(environment / "bin" / "torchperfd")
    trace = ROOT / "tests" / "golden" / "trace_small.json"
    analysis = subprocess.run(
        [command, "analyze", str(trace)], env=node.env, capture_output=True, text=True, check=True
    )
    assert "ProfilerStep*" in analysis.stdout

    node.metrics_port = free_port()
    with node.running(
        command, "serve", "--socket", str(node.socket), "--metrics-address", f"127.0.0.1:{node.metrics_port}"
    ) as daemon:
        eventually(lambda: node.get("/-/ready")[0] == 200, 20)
        assert "torchperfd_build_info" in node.get("/metrics")[1]
        ps = subprocess.run(
            [command, "ps", "--json"], env=node.env, capture_output=True, text=True, check=True
        )
        assert '"runs": []' in ps.stdout
        daemon.terminate()
        daemon.communicate(timeout=10)
        assert daemon.returncode == 0
