"""A script run by us sees and shows what it would under plain ``python``."""

import subprocess
import sys
from pathlib import Path

import pytest

FACTS = '''
"""What this is about."""
import json, os, pickle, sys

class Thing:
    pass

main = sys.modules["__main__"]
print(json.dumps({
    "name": __name__,
    "doc": __doc__,
    "file": __file__,
    "package": __package__,
    "spec": None if __spec__ is None else [__spec__.name, __spec__.origin, __spec__.parent],
    "loader": [type(__loader__).__name__, __loader__.name, __loader__.path],
    "builtins": type(__builtins__).__name__,
    "argv": sys.argv,
    "path": sys.path[0],
    "cwd": os.getcwd(),
    "main is me": main.__dict__ is globals(),
    "pickles": type(pickle.loads(pickle.dumps(Thing()))) is Thing,
    "code": (lambda: 0).__code__.co_filename,
    "future flags": (lambda: 0).__code__.co_flags & 0x1000000,
    "names": sorted(set(globals()) - {"__annotations__", "__cached__"}),
}, indent=1))
'''

# What launch.py does, as code that passes for a part of the package.
DRIVER = """
import sys, torchperfd
source = '''
from torchperfd.launch.script import Script, show
script = Script(sys.argv[2], tuple(sys.argv[3:]), is_module=sys.argv[1] == "-m")
try:
    script.execute()
except Exception as error:
    show(error)
    raise SystemExit(1)
'''
exec(compile(source, torchperfd.__path__[0] + "/driver.py", "exec"))
"""


class Runner:
    """Runs the same words under plain Python and under ``Script``, in the same place."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.driver = directory / "elsewhere" / "driver.py"
        self.driver.parent.mkdir()
        self.driver.write_text(DRIVER)

    def write(self, name: str, source: str) -> Path:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        return path

    def plain(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return self._run(*words)

    def ours(self, *words: str) -> "subprocess.CompletedProcess[str]":
        if words[0] != "-m":
            words = ("file", *words)
        return self._run(str(self.driver), *words)

    def _run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def assert_same(runner: Runner, *words: str) -> "subprocess.CompletedProcess[str]":
    plain, ours = runner.plain(*words), runner.ours(*words)
    assert ours.stdout == plain.stdout
    assert ours.stderr == plain.stderr
    assert ours.returncode == plain.returncode
    return ours


def test_a_file_sees_the_world_that_python_shows_it(runner: Runner) -> None:
    runner.write("train.py", FACTS)
    runner.write("sub/other.py", FACTS)
    done = assert_same(runner, str(runner.directory / "train.py"), "--lr", "0.1", "-m", "x y")
    assert '"name": "__main__"' in done.stdout
    assert_same(runner, "train.py")
    assert_same(runner, "sub/../sub/other.py")


def test_a_linked_file_finds_the_modules_beside_its_target(runner: Runner) -> None:
    runner.write("real/helper.py", "VALUE = 7")
    runner.write("real/train.py", "import helper; print(helper.VALUE, __file__)")
    (runner.directory / "linked.py").symlink_to(runner.directory / "real/train.py")
    assert assert_same(runner, "linked.py").stdout.startswith("7 ")


def test_a_module_sees_the_world_that_python_shows_it(runner: Runner) -> None:
    runner.write("jobs/__init__.py", "")
    runner.write("jobs/train.py", FACTS)
    done = assert_same(runner, "-m", "jobs.train", "--lr", "0.1")
    assert '"package": "jobs"' in done.stdout


def test_a_package_runs_its_main_module(runner: Runner) -> None:
    runner.write("jobs/__init__.py", "import sys; print('package sees', sys.argv)")
    runner.write("jobs/__main__.py", FACTS + "from . import __name__ as outer; print(outer)")
    done = assert_same(runner, "-m", "jobs", "a", "b")
    assert done.stdout.startswith("package sees ['-m', 'a', 'b']")
    assert done.stdout.endswith("jobs\n")


def test_a_source_may_declare_its_encoding(runner: Runner) -> None:
    path = runner.directory / "latin.py"
    path.write_bytes("# -*- coding: latin-1 -*-\nprint(ascii('é'))\n".encode("latin-1"))
    assert assert_same(runner, "latin.py").stdout == "'\\xe9'\n"


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("raise ValueError('no')", id="plain"),
        pytest.param("def f(n):\n    return f(n - 1) if n else 1 / 0\nf(3)", id="nested"),
        pytest.param(
            "try:\n    try:\n        1 / 0\n"
            "    except ZeroDivisionError as error:\n        raise ValueError from error\n"
            "except ValueError:\n    {}['key']",
            id="chained",
        ),
        pytest.param("import helper", id="in an import"),
        pytest.param("raise ExceptionGroup('several', [ValueError(1), TypeError(2)])", id="group"),
        pytest.param("import json\njson.loads('{')", id="in a library"),
        pytest.param("def f(:\n    pass", id="syntax"),
        pytest.param("import nothing_of_this_name", id="missing import"),
    ],
)
def test_a_traceback_is_the_one_that_python_prints(runner: Runner, source: str) -> None:
    runner.write("helper.py", "def broken():\n    raise OSError('disk')\n\nbroken()")
    runner.write("train.py", source)
    done = assert_same(runner, "train.py")
    assert done.returncode == 1
    assert "torchperfd" not in done.stderr


def test_a_hook_of_the_scripts_own_shows_the_error_its_way(runner: Runner) -> None:
    runner.write(
        "train.py", "import sys\nsys.excepthook = lambda kind, error, trace: print('mine:', error)\n1 / 0"
    )
    assert assert_same(runner, "train.py").stdout == "mine: division by zero\n"


def test_a_broken_hook_of_the_scripts_own_hides_no_error(runner: Runner) -> None:
    runner.write("train.py", "import sys\nsys.excepthook = lambda *_: {}['hook']\n1 / 0")
    done = runner.ours("train.py")
    assert done.returncode == 1
    assert "KeyError: 'hook'" in done.stderr
    assert "ZeroDivisionError: division by zero" in done.stderr


@pytest.mark.parametrize("code", ["3", "None", "'a last word'", "0"])
def test_an_exit_code_is_the_scripts(runner: Runner, code: str) -> None:
    runner.write("train.py", f"import sys; sys.exit({code})")
    assert_same(runner, "train.py")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing_of_this_name", "No module named nothing_of_this_name"),
        ("jobs", "No module named jobs.__main__"),
        ("jobs.nothing", "No module named jobs.nothing"),
        ("nothing.at_all", "Error while finding module specification for 'nothing.at_all'"),
    ],
)
def test_a_module_that_is_not_there_is_named(runner: Runner, name: str, words: str) -> None:
    runner.write("jobs/__init__.py", "")
    plain, ours = runner.plain("-m", name), runner.ours("-m", name)
    assert words in plain.stderr
    assert words in ours.stderr
    assert (plain.returncode, ours.returncode) == (1, 1)


def test_a_package_that_breaks_shows_no_frame_of_ours(runner: Runner) -> None:
    runner.write("jobs/__init__.py", "import nothing_of_this_name")
    runner.write("jobs/train.py", "")
    done = runner.ours("-m", "jobs.train")
    assert done.returncode == 1
    assert "No module named 'nothing_of_this_name'" in done.stderr
    assert "torchperfd" not in done.stderr
