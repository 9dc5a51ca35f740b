"""The wheel, built as the image builds it, in an environment without torch."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.support.node import ROOT, Node, eventually, free_port
from tests.support.wheels import copy_build_context

pytestmark = pytest.mark.slow

DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    context, wheels = tmp_path_factory.mktemp("context"), tmp_path_factory.mktemp("wheels")
    copy_build_context(context, DOCKERFILE)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels), str(context)],
        check=True,
        capture_output=True,
    )
    (path,) = wheels.glob("*.whl")
    return path


def test_the_wheel_holds_all_packages_and_the_generated_code(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {
        "torchperfd/__init__.py",
        "torchperfd/py.typed",
        "torchperfd/v1/session_pb2.py",
        "torchperfd_daemon/server/daemon.py",
        "torchperfd_daemon/py.typed",
        "torchperfd_cli/py.typed",
        "torchperfd_cli/commands/run.py",
        "torchperfd_daemon/web/assets/index.html",
        "torchperfd_daemon/grafana/dashboards/run.json",
        "torchperfd_daemon/docs/runbooks.md",
        "torchperfd_daemon/docs/causes/hang.md",
    } <= names
    assert not any(name.startswith(("tests/", "benchmarks/", "examples/")) for name in names)


@pytest.mark.needs("gcc")
def test_wheel_of_the_image_holds_the_native_hooks(wheel: Path) -> None:
    assert re.search(r"^RUN apt-get .*\bgcc\b", DOCKERFILE, re.MULTILINE)
    with zipfile.ZipFile(wheel) as archive:
        native = {name.split(".")[0] for name in archive.namelist() if name.endswith(".so")}
    assert native == {
        "torchperfd/events/_native",
        "torchperfd/steps/_templates",
        "torchperfd/launch/_sigterm",
        "torchperfd_daemon/analysis/_native",
    }
    assert "-cp311-abi3-" in wheel.name


def test_image_installs_extras_that_the_wheel_offers(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        offered = set(re.findall(r"^Provides-Extra: (.+)$", archive.read(metadata).decode(), re.MULTILINE))
    asked = [
        set(extras.split(",")) for extras in re.findall(r"(?:\.|torchperfd)\[([a-z0-9,]+)\]", DOCKERFILE)
    ]
    assert asked == [{"web", "s3", "otlp"}]
    assert asked[0] <= offered


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
