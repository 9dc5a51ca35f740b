"""``torchperfd run``: the script must not notice it, and its user must."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.node import EXAMPLE, Node, eventually

ENDINGS = {
    "normally": "print('done')",
    "sys_exit_3": "import sys; sys.exit(3)",
    "sys_exit_text": "import sys; sys.exit('the reason')",
    "exception": "def outer():\n    inner()\ndef inner():\n    raise ValueError('no')\nouter()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('x') from error",
    "syntax_error": "x = = 1",
    "hook_of_its_own": "import sys\nsys.excepthook = lambda *a: print('mine', a[0])\nraise OSError('gone')",
    "sigint_to_itself": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: pass",
    "os_exit": "import os; os._exit(7)",
    "sigterm_to_itself": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nwhile True: pass",
    "data_error": (
        "import torch\n"
        "from torch.utils.data import DataLoader, Dataset\n"
        "class D(Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): raise RuntimeError('bad sample')\n"
        "for _ in DataLoader(D()): pass"
    ),
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_ends_as_it_ends_without_us(node: Node, script: Path, ending: str) -> None:
    script.write_text(ENDINGS[ending])
    command = [sys.executable, str(script), "a", "--b"]
    plain = subprocess.run(command, env=node.env, capture_output=True, text=True, check=False)
    ours = node.command("run", "--quiet", "--no-daemon", str(script), "a", "--b")
    assert ours.returncode == plain.returncode
    assert ours.stdout == plain.stdout
    assert ours.stderr == plain.stderr


def test_exit_codes_are_0_3_and_1(node: Node, script: Path) -> None:
    for ending, code in (("normally", 0), ("sys_exit_3", 3), ("exception", 1)):
        script.write_text(ENDINGS[ending])
        assert node.command("run", "--quiet", str(script)).returncode == code


def test_a_script_sees_its_own_arguments_main_and_stdin(node: Node, script: Path) -> None:
    script.write_text(
        "import sys, json, pickle\n"
        "class Here: pass\n"
        "pickle.loads(pickle.dumps(Here()))\n"
        "import __main__\n"
        "print(json.dumps([sys.argv, __name__, __file__, __main__.Here is Here, sys.path[0], __spec__, "
        "sys.stdin.read()]))\n"
    )
    arguments = (str(script), "--run", "not-ours", "-m", "x")
    plain = subprocess.run(
        [sys.executable, *arguments], env=node.env, input="typed", capture_output=True, text=True, check=True
    )
    ours = subprocess.run(
        [sys.executable, "-m", "torchperfd", "run", "--quiet", "--no-daemon", *arguments],
        env=node.env,
        input="typed",
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ours.stdout) == json.loads(plain.stdout)


def test_a_module_runs_as_with_python_m(node: Node, tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helper.py").write_text("WORD = 'helped'\n")
    (package / "__main__.py").write_text(
        "import sys\nfrom .helper import WORD\nprint(WORD, __name__, __package__, __spec__.name, sys.argv)\n"
    )
    plain, ours = (
        subprocess.run(
            [sys.executable, *command, "-m", "pkg", "arg"],
            cwd=tmp_path,
            env=node.env,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for command in ([], ["-m", "torchperfd", "run", "--quiet", "--no-daemon"])
    )
    assert ours == plain


def test_spawned_workers_find_the_scripts_functions(node: Node, script: Path) -> None:
    script.write_text(
        "import multiprocessing as mp\n"
        "def double(x): return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with mp.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(double, [1, 2]))\n"
    )
    done = node.command("run", "--quiet", "--no-daemon", str(script))
    assert done.stdout == "[2, 4]\n", done.stderr


def test_ctrl_c_ends_it_as_it_would_end_the_script(node: Node, script: Path) -> None:
    script.write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    outcomes = []
    for prefix in ([], ["-m", "torchperfd", "run", "--quiet"]):
        with node.running(sys.executable, *prefix, str(script)) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            # It has printed, but may not have come to sleep yet; the traceback would show where.
            eventually(lambda: _state(process.pid) == "S", 10)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=20)
            outcomes.append((process.returncode, errors))
    assert outcomes[1] == outcomes[0]
    assert outcomes[0][0] == -signal.SIGINT
    assert "KeyboardInterrupt" in outcomes[0][1]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("import argparse; argparse.ArgumentParser().parse_args(['--nope'])", "exit code 2"),
    ],
)
def test_script_failing_before_training_has_its_error(
    node: Node, script: Path, content: str, error: str
) -> None:
    script.write_text(content)
    why = f"the script failed before its first training step: {error}"
    assert why in " ".join(node.command("run", "--no-daemon", str(script)).stderr.split())
    (run,) = node.json("runs")["runs"]
    shown = node.command("runs", "show", run["id"]).stdout
    assert why in " ".join(shown.split())
    assert f"failed: {error}" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nope", "x.py"], "no such option '--nope'"),
        ([], "no script given"),
        (["--report"], "--report needs a value"),
        (["-m"], "-m needs a module"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(node: Node, arguments: list[str], words: str) -> None:
    done = node.command("run", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_script_that_is_not_there_exits_3(node: Node) -> None:
    done = node.command("run", "missing.py")
    assert done.returncode == 3
    assert done.stderr == "torchperfd: can't open file 'missing.py'; is the path right?\n"


def test_phases_sum_to_the_step_in_training_and_validation(node: Node, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = node.command("run", "--report", str(report), str(EXAMPLE), "--epochs", "3")
    assert done.returncode == 0, done.stderr
    document = json.loads(report.read_text())
    assert document["schema"] == "torchperfd.run/1"
    # On a busy machine the run lacks a CPU: that is said, or nothing is claimed.
    assert document["verdict"]["cause"] in ("none", "input-bound", "unknown", "CPU contention")
    (rank,) = document["ranks"]
    assert (rank["train"]["steps"], rank["validate"]["steps"]) == (3 * 45, 3 * 12)
    for kind in ("train", "validate"):
        phases = rank[kind]["phases"]
        total = sum(phase["seconds_total"] for phase in phases.values())
        assert total == pytest.approx(rank[kind]["step_seconds_total"], rel=0.02)
        for phase in phases.values():
            mean = phase["seconds_total"] / phase["calls"]
            assert phase["mean_seconds"] == pytest.approx(mean)
    train, validate = rank["train"]["phases"], rank["validate"]["phases"]
    assert {
        name: train[name]["calls"] for name in ("data", "backward", "optimizer", "zero_grad")
    } == dict.fromkeys(("data", "backward", "optimizer", "zero_grad"), 135)
    assert train["forward"]["calls"] == 135
    assert validate["forward"]["calls"] == 36
    assert not {"backward", "optimizer", "zero_grad"} & set(validate)


@pytest.mark.serial
def test_totals_agree_with_the_scripts_own_clock(node: Node, tmp_path: Path) -> None:
    """Sum of our step times against a timer in the loop itself, for training and validation."""
    script = tmp_path / "timed.py"
    script.write_text(
        "import json, sys, time, torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "torch.manual_seed(0)\n"
        "data = TensorDataset(torch.randn(640, 256), torch.randint(0, 10, (640,)))\n"
        "model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        # The first draw is when torchperfd looks for the model, once, for tens of milliseconds.
        "next(iter(DataLoader(data, batch_size=16)))\n"
        "spent = {'train': 0.0, 'validate': 0.0}\n"
        "def timed(kind, loader):\n"
        "    iterator = iter(loader)\n"
        "    while True:\n"
        "        began = time.perf_counter()\n"
        "        try: batch = next(iterator)\n"
        "        except StopIteration: return\n"
        "        yield batch\n"
        "        spent[kind] += time.perf_counter() - began\n"
        "for epoch in range(5):\n"
        "    model.train()\n"
        "    for x, y in timed('train', DataLoader(data, batch_size=16)):\n"
        "        time.sleep(0.002)\n"
        "        optimizer.zero_grad()\n"
        "        torch.nn.functional.cross_entropy(model(x), y).backward()\n"
        "        optimizer.step()\n"
        "    model.eval()\n"
        "    time.sleep(0.2)\n"
        "    with torch.no_grad():\n"
        "        for x, y in timed('validate', DataLoader(data, batch_size=16)):\n"
        "            model(x); time.sleep(0.002)\n"
        "json.dump(spent, open(sys.argv[1], 'w'))\n"
    )
    own, report = tmp_path / "own.json", tmp_path / "report.json"
    done = node.command("run", "--no-daemon", "--report", str(report), str(script), str(own))
    assert done.returncode == 0, done.stderr
    spent = json.loads(own.read_text())
    (rank,) = json.loads(report.read_text())["ranks"]
    for kind in ("train", "validate"):
        assert rank[kind]["steps"] == 200
        assert rank[kind]["step_seconds_total"] == pytest.approx(spent[kind], rel=0.02)


def test_an_embedded_daemon_comes_with_the_run_and_goes_with_it(node: Node) -> None:
    with node.train("--epochs", "200", script=EXAMPLE, options=()) as process:
        eventually(lambda: node.command("ps").returncode == 0, 30)
        eventually(lambda: any(rank["steps"] for run in node.json("ps")["runs"] for rank in run["ranks"]), 30)
        (daemon_pid,) = _embedded_daemons(process.pid)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert " a step (lately p50 " in errors
    assert any(mark in errors for mark in ("✓ HEALTHY", "✗ ", "? NOT KNOWN"))
    eventually(lambda: not Path(f"/proc/{daemon_pid}").exists(), 5)
    assert node.command("ps").returncode == 4


def test_an_embedded_daemon_does_not_outlive_a_killed_run(node: Node) -> None:
    with node.train("--epochs", "200", script=EXAMPLE, options=()) as process:
        eventually(lambda: node.command("ps").returncode == 0, 30)
        (daemon_pid,) = _embedded_daemons(process.pid)
        process.kill()
        process.communicate()
    eventually(lambda: not Path(f"/proc/{daemon_pid}").exists(), 10)


def _embedded_daemons(parent: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"--embedded" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


def _state(pid: int) -> str:
    """Return the scheduler's letter for a process's main thread."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
