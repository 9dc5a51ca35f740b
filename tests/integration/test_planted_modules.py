"""Modules in a current directory that other users may write: no command of ours imports one."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.support.node import Node, eventually

from torchperfd_daemon.captures import low_priority

BIN = Path(sys.executable).parent
OURS = ("torchperfd", "torchperfd_daemon", "torchperfd_cli")
THEIRS = (
    *("grpc", "grpc_health", "google", "click", "msgspec", "numpy", "prometheus_client", "psutil", "pynvml"),
    *("starlette", "uvicorn", "httptools", "h11", "torch", "sitecustomize", "usercustomize"),
    *(name for name in sys.stdlib_module_names if not name.startswith("_")),
)

PLANT = """
import os
with open({notes!r}, "a") as notes:
    print({name!r}, "ran as", os.getuid(), file=notes)
raise SystemExit(9)
"""

SCRIPT = """
import time
print("script ran", flush=True)
time.sleep(1)
"""

LOADER = """
import torch
from torch.utils.data import DataLoader, TensorDataset
def make():
    return DataLoader(TensorDataset(torch.zeros(64, 4)), batch_size=4)
"""

TRAINING = """
import time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4096, 4)), batch_size=4)
for _ in range(20):
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
"""


class Place:
    """A hostile current directory, and the user's own one elsewhere."""

    def __init__(self, node: Node, directory: Path) -> None:
        self.node = node
        self.hostile, self.own, self.notes = (directory / each for each in ("hostile", "own", "notes"))
        self.hostile.mkdir()
        self.own.mkdir()
        self.env = {name: value for name, value in node.env.items() if name != "PYTHONPATH"}

    def plant(self, *names: str) -> None:
        for name in names:
            (self.hostile / f"{name}.py").write_text(PLANT.format(notes=str(self.notes), name=name))
        # What `python -m torchperfd` asks for its command.
        metadata = self.hostile / "torchperfd-9.9.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torchperfd\nVersion: 9.9\n")
        (metadata / "entry_points.txt").write_text("[console_scripts]\ntorchperfd = antigravity:main\n")

    def plant_for_python_m(self, *names: str) -> None:
        """Plant all but what ``python -m`` itself imports, whatever it is to run."""
        self.write("loaded.py", "import sys; print(*sys.modules)")
        done = subprocess.run(
            [sys.executable, "-m", "loaded"],
            cwd=self.own,
            env=self.env,
            capture_output=True,
            text=True,
            check=True,
        )
        self.plant(*sorted({*names} - {*done.stdout.split()}))

    def write(self, name: str, text: str) -> str:
        path = self.own / name
        path.write_text(text)
        return str(path)

    def run(self, *command: str | Path, timeout: float = 150) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command,
            cwd=self.hostile,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )

    def ran(self) -> str:
        return self.notes.read_text() if self.notes.exists() else ""


@pytest.fixture
def place(node: Node, tmp_path: Path) -> Place:
    return Place(node, tmp_path)


def test_planted_modules_are_found_by_plain_python(place: Place) -> None:
    """The plants work: a command that searched the current directory would run them."""
    place.plant(*OURS, "json")
    assert place.run(sys.executable, "-c", "import torchperfd").returncode == 9
    assert "torchperfd ran as" in place.ran()


def test_run_with_an_embedded_daemon_imports_no_plant(place: Place) -> None:
    place.plant(*OURS, *THEIRS)
    done = place.run(BIN / "torchperfd", "run", place.write("train.py", SCRIPT))
    assert (done.returncode, done.stdout, place.ran()) == (0, "script ran\n", ""), done.stderr


@pytest.mark.parametrize("daemon", ["own", "none"])
def test_python_m_torchperfd_run_imports_no_plant(place: Place, daemon: str) -> None:
    """Python itself finds the package in the current directory: that one name cannot be guarded."""
    place.plant_for_python_m("torchperfd_daemon", "torchperfd_cli", *THEIRS)
    options = ["--no-daemon"] if daemon == "none" else []
    script = place.write("train.py", SCRIPT)
    done = place.run(sys.executable, "-m", "torchperfd", "run", *options, script)
    assert (done.returncode, done.stdout, place.ran()) == (0, "script ran\n", ""), done.stderr


@pytest.mark.parametrize(
    ("package", "plants"),
    [
        ("torchperfd", ("torchperfd_daemon", "torchperfd_cli")),
        ("torchperfd_daemon", ("torchperfd", "torchperfd_cli")),
    ],
)
def test_python_m_of_a_command_imports_no_plant(place: Place, package: str, plants: tuple[str, ...]) -> None:
    place.plant_for_python_m(*plants, *THEIRS)
    done = place.run(sys.executable, "-m", package, "version")
    assert (done.returncode, place.ran()) == (0, ""), done.stderr


@pytest.mark.slow
def test_ranks_of_torchrun_import_no_plant(place: Place) -> None:
    place.plant_for_python_m("torchperfd_daemon", "torchperfd_cli", *THEIRS)
    script = place.write("train.py", SCRIPT)
    done = place.run(
        BIN / "torchrun", "--standalone", "--nproc-per-node", "2", "-m", "torchperfd", "run", script
    )
    assert (done.returncode, done.stdout, place.ran()) == (0, "script ran\n" * 2, ""), done.stderr


@pytest.mark.slow
def test_ranks_of_torchrun_without_python_import_no_plant(place: Place) -> None:
    """The way to start ranks in a directory that others may write."""
    place.plant(*OURS, *THEIRS)
    script = place.write("train.py", SCRIPT)
    torchrun = (BIN / "torchrun", "--standalone", "--nproc-per-node", "2", "--no-python")
    done = place.run(*torchrun, BIN / "torchperfd", "run", "--no-daemon", script)
    assert (done.returncode, done.stdout, place.ran()) == (0, "script ran\n" * 2, ""), done.stderr


TRACE = {
    "traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 5}]
}


USER = 61_001
"""An id that no account of a test machine has."""
BY_DAEMON = (sys.executable, "-P", low_priority.__file__)


@pytest.mark.parametrize(
    "command",
    [
        (*BY_DAEMON, "analyze", "--json"),
        (*BY_DAEMON, "compare", "--json", "FOLDER"),
        pytest.param(
            (*BY_DAEMON, f"--user={USER}:{USER}", "analyze", "--json"),
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
        ),
        (BIN / "torchperfd", "analyze"),
        (BIN / "torchperfd", "compare", "FOLDER"),
    ],
    ids=["daemon", "daemon compares", "daemon as a user", "person", "person compares"],
)
def test_analysis_imports_no_plant(place: Place, command: tuple[str, ...]) -> None:
    """Of two ranks, so that each has a process of its own."""
    place.plant(*OURS, *THEIRS)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o755)
        for rank in range(2):
            (folder / f"rank{rank}.json").write_text(json.dumps({**TRACE, "distributedInfo": {"rank": rank}}))
        done = place.run(*(str(folder) if word == "FOLDER" else word for word in command), str(folder))
        assert place.ran() == ""
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_daemon_in_a_hostile_directory_imports_no_plant(place: Place) -> None:
    place.plant(*OURS, *THEIRS)
    command = (BIN / "torchperfd", "serve", "--socket", place.node.socket, "--metrics-address", "127.0.0.1:0")
    with subprocess.Popen(
        [*command, "--captures-dir", place.node.captures],
        cwd=place.hostile,
        env=place.env,
        stderr=subprocess.PIPE,
    ) as daemon:
        try:
            eventually(place.node.socket.exists, 60, place.ran)
            script = place.write("train.py", TRAINING)
            done = place.run(BIN / "torchperfd", "run", script)
        finally:
            daemon.terminate()
            daemon.communicate(timeout=30)
    assert (done.returncode, place.ran()) == (0, ""), done.stderr


@pytest.mark.slow
def test_bench_and_tune_import_no_plant(place: Place) -> None:
    place.plant(*OURS, *THEIRS)
    loader = place.write("loader.py", LOADER)
    done = place.run(
        *(
            BIN / "torchperfd",
            "bench",
            "dataloader",
            f"{loader}:make",
            "--seconds",
            "0.1",
            "--max-workers",
            "1",
        )
    )
    assert (done.returncode, place.ran()) == (0, ""), done.stderr
    done = place.run(
        BIN / "torchperfd", "tune", "--limit", "20", "--only", "threads", place.write("train.py", TRAINING)
    )
    assert place.ran() == "", done.stderr


FACTS = """
import json, multiprocessing, os, subprocess, sys
def facts():
    return [sys.path, list(sys.flags), sys.warnoptions, sorted(os.environ.items())]
def show():
    print(json.dumps(facts()), flush=True)
if __name__ == "__main__":
    show()
    child = multiprocessing.get_context("spawn").Process(target=show)
    child.start()
    child.join()
    code = "import json, os, sys; print(json.dumps([sys.path, sorted(os.environ.items())]))"
    subprocess.run([sys.executable, "-c", code])
"""


SAFE, PATHS = {"PYTHONSAFEPATH": "1"}, {"PYTHONPATH": "/nowhere/a:/nowhere/b"}


@pytest.mark.parametrize(
    ("target", "flags", "variables"),
    [
        ("file", (), {}),
        ("link", (), PATHS),
        ("module", (), {}),
        ("module", (), PATHS),
        ("file", (), SAFE),
        ("file", ("-I",), PATHS),
        ("file", ("-E",), PATHS),
        ("file", ("-P",), {}),
        ("module", ("-P",), {"PYTHONPATH": "."}),
        ("file", ("-O", "-W", "error::UserWarning"), {}),
    ],
)
def test_script_and_children_see_what_plain_python_gives(
    place: Place, target: str, flags: tuple[str, ...], variables: dict[str, str]
) -> None:
    package = place.hostile / "package"
    package.mkdir()
    for path in (package / "module.py", place.own / "train.py"):
        path.write_text(FACTS)
    (package / "__init__.py").touch()
    (place.hostile / "linked.py").symlink_to(place.own / "train.py")
    words = {"file": [str(place.own / "train.py")], "module": ["-m", "package.module"], "link": ["linked.py"]}
    place.env |= variables
    run = ("-m", "torchperfd", "run", "--quiet", "--no-daemon")
    plain = place.run(sys.executable, *flags, *words[target])
    ours = place.run(sys.executable, *flags, *run, *words[target])
    assert plain.returncode == 0, plain.stderr
    assert [*map(json.loads, ours.stdout.splitlines())] == [*map(json.loads, plain.stdout.splitlines())]
    assert (ours.returncode, ours.stderr) == (0, plain.stderr)
    if not flags:
        command = place.run(BIN / "torchperfd", *run[2:], *words[target])
        assert (command.stdout, command.stderr) == (plain.stdout, plain.stderr)


def test_script_in_a_directory_that_was_removed_runs(place: Place) -> None:
    script = place.write("train.py", "import sys; print(sys.path[0])")
    for python in ((sys.executable,), (sys.executable, "-m", "torchperfd", "run", "--quiet", "--no-daemon")):
        gone = place.hostile / "gone"
        gone.mkdir()
        leave = f"os.chdir({str(gone)!r}); os.rmdir({str(gone)!r})"
        code = f"import os, sys; {leave}; os.execv(sys.argv[1], sys.argv[1:])"
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *python, script],
            env=place.env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, f"{place.own}\n"), done.stderr
