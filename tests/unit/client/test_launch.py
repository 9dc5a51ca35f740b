"""The command line of `torchperfd run`, and ranks that Lightning starts."""

import importlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from torchperfd.launch import runner as launch
from torchperfd.launch.options import OPTIONS, RunOption
from torchperfd.launch.runner import LightningLauncher, RunOptions, parse
from torchperfd.launch.script import Script
from torchperfd.model.own_commands import script_command


def parsed(arguments: list[str]) -> RunOptions:
    options = parse(arguments)
    assert options is not None
    return options


def test_a_script_alone() -> None:
    assert parse(["train.py"]) == RunOptions(Script("train.py", (), is_module=False))


def test_everything_after_the_script_is_the_scripts() -> None:
    options = parse(["train.py", "--quiet", "-m", "--run", "x", "-h", "--"])
    assert options == RunOptions(
        Script("train.py", ("--quiet", "-m", "--run", "x", "-h", "--"), is_module=False)
    )


def test_everything_after_the_module_is_the_modules() -> None:
    options = parse(["--job", "bert", "-m", "jobs.train", "--quiet", "train.py"])
    assert options == RunOptions(Script("jobs.train", ("--quiet", "train.py"), is_module=True), job="bert")


def test_every_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    expected = RunOptions(
        Script("train.py", ("--epochs", "2"), is_module=False),
        run="bert-17",
        job="bert",
        report=tmp_path / "out/run.json",
        start_daemon=False,
        quiet=True,
    )
    apart = "--run bert-17 --job bert --report out/run.json --no-daemon --quiet train.py --epochs 2"
    joined = "--quiet --no-daemon --report=out/run.json --job=bert --run=bert-17 train.py --epochs 2"
    assert parse(apart.split()) == expected
    assert parse(joined.split()) == expected


def test_report_path_survives_a_change_of_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert parsed(["--report", "run.json", "x.py"]).report == tmp_path / "run.json"
    assert parsed(["--report", "/elsewhere/run.json", "x.py"]).report == Path("/elsewhere/run.json")


def test_value_may_begin_with_dashes_or_hold_an_equals_sign() -> None:
    assert parsed(["--run", "--odd", "x.py"]).run == "--odd"
    assert parsed(["--run=a=b", "x.py"]).run == "a=b"


def test_the_last_of_two_values_counts() -> None:
    assert parsed(["--job", "a", "--job=b", "x.py"]).job == "b"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "no script given"),
        (["--quiet"], "no script given"),
        (["-m"], "-m needs a module"),
        (["--run"], "--run needs a value"),
        (["--quiet", "--report"], "--report needs a value"),
        (["--fail-above", "5%", "train.py"], "--fail-above needs a --baseline"),
        (
            ["--baseline=a", "--fail-above=fast", "train.py"],
            "--fail-above fast is no share such as 5% or 0.05",
        ),
        (["--epochs", "3", "train.py"], "no such option '--epochs'"),
        (["--quiet=1", "train.py"], "no such option '--quiet=1'; did you mean --quiet?"),
        (["--no-deamon", "train.py"], "no such option '--no-deamon'; did you mean --no-daemon?"),
        (["-x", "train.py"], "no such option '-x'"),
    ],
)
def test_invalid_command_line_is_one_line_and_exit_code_2(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        launch.main(words)
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    joint = " " if complaint.endswith("?") else "; "
    assert (out, err) == ("", f"torchperfd: {complaint}{joint}see `torchperfd run --help`\n")


def test_a_script_that_is_not_there_is_one_line_and_exit_code_3(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for missing in (tmp_path / "nothing.py", tmp_path):
        with pytest.raises(SystemExit) as exit_:
            launch.main([str(missing)])
        assert exit_.value.code == 3
        out, err = capsys.readouterr()
        assert (out, err) == ("", f"torchperfd: can't open file '{missing}'; is the path right?\n")


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_names_every_option(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    launch.main([word, "--nonsense"])
    out, err = capsys.readouterr()
    assert err == ""
    for option in ("--name NAME", "--job NAME", "--report FILE", "--no-daemon", "--quiet", "-m MODULE"):
        assert option in out
    assert max(map(len, out.splitlines())) <= 100


def test_module_entry_runs_with_the_remaining_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(launch, "main", seen.append)
    monkeypatch.setattr(sys, "argv", ["torchperfd", "run", "train.py", "run"])
    runpy.run_module("torchperfd", run_name="__main__")
    assert seen == [["train.py", "run"]]


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.value])
def test_options_of_run_pass_torchrun(option: RunOption) -> None:
    """torchrun reads abbreviations of its own options behind -m, too."""
    words = [
        "--nproc-per-node",
        "2",
        "-m",
        "torchperfd",
        "run",
        option.name,
        "value",
        "train.py",
        "--epochs",
        "3",
    ]
    given = get_args_parser().parse_args(words)
    assert (given.training_script, given.training_script_args) == ("torchperfd", words[4:])


@pytest.mark.parametrize("option", [option for option in OPTIONS if not option.value])
def test_flags_of_run_pass_torchrun(option: RunOption) -> None:
    words = ["-m", "torchperfd", "run", option.name, "train.py"]
    assert get_args_parser().parse_args(words).training_script_args == words[2:]


def test_run_is_another_word_for_name() -> None:
    for words in (["--name", "a", "t.py"], ["--run", "a", "t.py"], ["--run=a", "t.py"]):
        options = parse(words)
        assert options is not None
        assert options.run == "a"


MODULE = "lightning_fabric.strategies.launchers.subprocess_script"


@pytest.fixture
def lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return where a package of Lightning's structure has its launcher."""
    folder = tmp_path / "lightning_fabric" / "strategies" / "launchers"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parent.parent):
        (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_fabric"]:
        monkeypatch.delitem(sys.modules, name)
    yield folder / "subprocess_script.py"
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_fabric"]:
        del sys.modules[name]


def test_a_launched_rank_runs_under_torchperfd(lightning: Path) -> None:
    lightning.write_text(
        "import sys\ndef _basic_subprocess_cmd(): return [sys.executable, '/x/train.py', '--lr', '1']\n"
    )
    launcher = LightningLauncher("run-7", "train")
    module = importlib.import_module(MODULE)
    assert module._basic_subprocess_cmd() == script_command(
        *("torchperfd.__main__", "run", "--quiet", "--no-daemon"),
        *("--run", "run-7", "--job", "train", "/x/train.py", "--lr", "1"),
    )
    launcher.leave()
    assert module._basic_subprocess_cmd() == [sys.executable, "/x/train.py", "--lr", "1"]


def test_a_launcher_that_is_not_known_is_left_alone(lightning: Path) -> None:
    lightning.write_text("def _basic_subprocess_cmd(): return ['srun', 'train.py']\n")
    launcher = LightningLauncher("run-7", "train")
    assert importlib.import_module(MODULE)._basic_subprocess_cmd() == ["srun", "train.py"]
    launcher.leave()


def test_a_launcher_of_another_structure_is_left_alone(lightning: Path) -> None:
    lightning.write_text("")
    launcher = LightningLauncher("run-7", "train")
    assert not hasattr(importlib.import_module(MODULE), "_basic_subprocess_cmd")
    launcher.leave()
