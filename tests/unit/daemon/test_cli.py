"""The command line as a whole: its codes, its one-line errors, and the commands without a daemon."""

import json
import platform
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path

import click
import pytest
from tests.support.commands import Run
from tests.support.run_documents import run_file
from tests.support.values import some

from torchperfd._version import NATIVE_ABI, NATIVE_MODULES, __revision__, __version__, missing_native_modules
from torchperfd.model.own_commands import script_command
from torchperfd.report.store import RunStore
from torchperfd_cli import main
from torchperfd_cli.commands import version
from torchperfd_cli.main import EXAMPLES
from torchperfd_daemon import errors


def test_help_names_every_command(run: Run) -> None:
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    for name, words in main.COMMANDS.items():
        assert name in out
        assert words in out


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_is_there(name: str) -> None:
    command = some(main.cli.get_command(click.Context(main.cli), name))
    assert command.name == name
    assert command.help or command.get_short_help_str()


def test_an_unknown_command_is_a_usage_error(run: Run) -> None:
    code, out, err = run("fly")
    assert (code, out) == (2, "")
    assert err == "torchperfd: no such command 'fly'; see `torchperfd --help`\n"


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["diagnos"], "diagnose"),
        (["rank"], "ranks"),
        (["captures", "lst"], "list"),
        (["ps", "--flet"], "--fleet"),
        (["captures", "list", "--sinse", "2d"], "--since"),
        (["runs", "--runsdir", "x"], "--runs-dir"),
    ],
)
def test_unknown_names_say_which_may_be_meant(run: Run, arguments: list[str], meant: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    words = (
        rf"torchperfd: no such (command|option) '\S+'; did you mean {meant}\? see `torchperfd[\w ]* --help`\n"
    )
    assert re.fullmatch(words, err), err


def test_near_misses_of_ids_say_which_may_be_meant(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of captures and of kept runs; whole ids, and beginnings of them."""
    monkeypatch.setenv("TORCHPERFD_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("TORCHPERFD_CAPTURES_DIR", str(tmp_path / "captures"))
    (tmp_path / "captures" / "20261127-165610-645ff7").mkdir(parents=True)
    RunStore(str(tmp_path / "runs")).keep(run_file("train-3f2a", steps=20, seconds={"forward": 0.1}))
    (tmp_path / "report.json").write_text("{}")
    for arguments, what, meant in (
        (("captures", "get", "20261127-165610-645ff8"), "capture", "20261127-165610-645ff7"),
        (("captures", "rm", "20261172-1656"), "capture", "20261127-165610-645ff7"),
        (("analyze", "20261127-165610-645f7"), "capture", "20261127-165610-645ff7"),
        (("runs", "show", "tarin"), "kept run", "train-3f2a"),
        (("runs", "rm", "train-3f2b"), "kept run", "train-3f2a"),
    ):
        expected = f"torchperfd: no {what} {arguments[-1]}; did you mean {meant}?\n"
        assert run(*arguments) == (3, "", expected)
    code, _, err = run("compare", "train-3f2a", "train-3f2b")
    assert code == 3
    assert err.endswith("train-3f2b is neither a kept run nor a report of one; did you mean train-3f2a?\n")


def test_every_command_is_in_one_group_of_the_help() -> None:
    grouped = [name for names in main.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(set(grouped))
    assert set(grouped) <= set(main.COMMANDS)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name])
def test_examples_name_options_that_exist(name: str) -> None:
    command = some(main.cli.get_command(click.Context(main.cli), name))
    for line, _ in EXAMPLES[name]:
        words = shlex.split(line.partition(" > ")[0])
        assert words[:2] == ["torchperfd", name]
        leaf, rest = command, words[2:]
        if isinstance(command, click.Group):
            found = command.get_command(click.Context(command), rest[0])
            assert found is not None, line
            leaf, rest = found, rest[1:]
        known = {option for parameter in leaf.params for option in parameter.opts}
        assert {word for word in rest if word.startswith("-")} <= known, line


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name])
def test_help_of_a_command_ends_with_its_examples(run: Run, name: str) -> None:
    code, out, _ = run(name, "--help")
    assert code == 0
    shown = " ".join(out.split())
    assert all(" ".join(line.split()) in shown for line, _ in EXAMPLES[name])


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(run: Run, shell: str) -> None:
    code, out, _ = run("completion", shell)
    assert code == 0
    assert f"_TORCHPERFD_COMPLETE={shell}_complete" in out


def test_completion_completes_commands_and_options() -> None:
    from click.shell_completion import ShellComplete

    complete = ShellComplete(main.cli, {}, "torchperfd", "_TORCHPERFD_COMPLETE")
    assert {each.value for each in complete.get_completions([], "ca")} == {"capture", "captures"}
    assert "--steps" in {each.value for each in complete.get_completions(["capture"], "--s")}


@pytest.mark.parametrize("arguments", [["ps", "--no-such"], ["capture", "--steps", "0"], ["captures", "rm"]])
def test_a_wrong_option_is_a_usage_error(run: Run, arguments: list[str]) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("torchperfd: ")
    assert err.endswith(
        f"; see `torchperfd {' '.join(arguments[: 1 + (arguments[0] == 'captures')])} --help`\n"
    )
    assert err.count("\n") == 1


def test_version_as_text(run: Run) -> None:
    code, out, err = run("version")
    assert (code, err) == (0, "")
    assert out.splitlines()[:3] == [
        f"torchperfd {__version__} (protocol 1-1)",
        f"revision {__revision__ or 'unknown'}",
        f"Python {platform.python_version()}",
    ]
    assert f"grpcio {metadata.version('grpcio')}" in out.splitlines()


def test_version_as_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "_DEPENDENCIES", ("grpcio", "no-such-distribution"))
    code, out, err = run("version", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "schema": "torchperfd.version/1",
        "version": __version__,
        "revision": __revision__ or None,
        "api": {"min": 1, "max": 1},
        "python": platform.python_version(),
        "executable": sys.executable,
        "hooks": "native",
        "dependencies": {"grpcio": metadata.version("grpcio"), "no-such-distribution": None},
    }
    assert "no-such-distribution not installed\n" in run("version")[1]


def test_version_without_compiled_hooks_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "missing_native_modules", lambda: ["_cycles"])
    assert json.loads(run("version", "--json")[1])["hooks"] == "reference"
    assert "hooks reference (Python, slower: see `torchperfd doctor`)\n" in run("version")[1]


def test_native_modules_are_those_that_the_build_compiles(tmp_path: Path) -> None:
    hook = (Path(__file__).resolve().parents[3] / "hatch_build.py").read_text(encoding="utf-8")
    for name in NATIVE_MODULES:
        assert f'"client/torchperfd/{name}": ' in hook
    # And what concludes a run at SIGTERM, and the analyser's, which cost no step where they are missing.
    assert hook.count('.c",') == len(NATIVE_MODULES) + 2
    assert missing_native_modules(str(tmp_path)) == list(NATIVE_MODULES)


def test_native_module_of_another_version_counts_as_missing(tmp_path: Path) -> None:
    built, outdated = (tmp_path / f"{name}.abi3.so" for name in NATIVE_MODULES)
    for path, abi in ((built, NATIVE_ABI), (outdated, NATIVE_ABI + "0")):
        path.parent.mkdir()
        path.write_bytes(b"\x7fELF" + abi.encode() + b"\0")
    assert missing_native_modules(str(tmp_path)) == [NATIVE_MODULES[1]]


@pytest.mark.parametrize("arguments", [["ps"], ["ps", "--json"], ["capture"], ["capture", "--json"]])
def test_without_a_daemon_it_is_said_in_one_line(run: Run, tmp_path: Path, arguments: list[str]) -> None:
    missing = tmp_path / "no.sock"
    code, out, err = run(*arguments, "--socket", str(missing))
    assert (code, out) == (4, "")
    assert err == f"torchperfd: no daemon answers at {missing}; start one with `torchperfd serve`\n"


def test_without_a_daemon_the_next_thing_is_to_train(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHPERFD_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("torchperfd.v1.contract.SYSTEM_SOCKET", str(tmp_path / "system.sock"))
    code, _, err = run("ps")
    assert code == 4
    words = "no training runs under torchperfd on this machine; start one with `torchperfd run train.py`"
    assert err == f"torchperfd: {words}\n"
    monkeypatch.setenv("TORCHPERFD_SOCKET", str(tmp_path / "mine.sock"))
    assert f"at {tmp_path}/mine.sock;" in run("ps")[2]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.TorchperfdError, 1),
        (errors.UsageError, 2),
        (errors.NoSuchTargetError, 3),
        (errors.DaemonUnreachableError, 4),
        (errors.PartialResultError, 5),
        (errors.IncompatibleVersionError, 6),
        (errors.DeadlineError, 124),
    ],
)
def test_every_error_has_its_documented_code(
    run: Run, error: type[errors.TorchperfdError], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str) -> None:
        raise error("it broke", "mend it")

    monkeypatch.setattr(version, "_installed", fail)
    assert run("version") == (code, "", "torchperfd: it broke; mend it\n")


def test_an_error_without_a_remedy_is_the_problem_alone() -> None:
    assert str(errors.TorchperfdError("it broke")) == "it broke"


def test_an_interrupt_is_no_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(version, "_installed", interrupt)
    code, out, err = run("version")
    assert (code, out, err.strip()) == (130, "", "")


def test_main_exits_with_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["fly"])
    assert caught.value.code == 2


def test_run_hands_over_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[object] = []
    monkeypatch.setattr("os.execv", lambda *arguments: handed.extend(arguments))
    assert main.run_command(["run", "--job", "x", "train.py", "--help", "-v"]) == 0
    assert handed == [
        sys.executable,
        script_command("torchperfd.__main__", "run", "--job", "x", "train.py", "--help", "-v"),
    ]
    assert main.run_command(["run", "train.py", "--", "-x"]) == 0
    assert handed[-1] == script_command("torchperfd.__main__", "run", "train.py", "--", "-x")


@pytest.mark.parametrize("arguments", [["serve", "--interval", "nan"], ["capture", "--timeout", "nan"]])
def test_a_time_that_is_no_number_is_a_usage_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run_command(arguments) == 2
    assert "'nan' is not a time in seconds" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["4711;x"], ["4711", "--json"], ["4711", "--run", "x"], ["-1"]])
def test_slurm_job_takes_an_id_and_no_more(more: list[str], run: Run) -> None:
    code, out, err = run("diagnose", "--slurm-job", *more)
    assert (code, out) == (2, "")
    assert "--slurm-job" in err
