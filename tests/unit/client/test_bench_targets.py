"""What ``module:name`` and ``file.py:name`` name, and how what a script raises is put into one line."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchperfd_cli.bench.worker_process import BadTargetError, explain, find_target

SCRIPT = """
class Data:
    @staticmethod
    def make():
        return 'made'

value = 3
if __name__ == '__main__':
    raise SystemExit('run')
"""


@pytest.fixture(autouse=True)
def imports() -> Iterator[None]:
    """Leave the imports as they were."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "bench_script.py"
    path.write_text(SCRIPT)
    return path


def test_name_in_a_module() -> None:
    assert find_target("json:dumps") is sys.modules["json"].dumps


def test_name_in_a_script_that_is_not_run(script: Path) -> None:
    assert find_target(f"{script}:value") == 3
    assert find_target(f"{script}:Data.make")() == "made"


def test_objects_of_a_script_can_be_pickled_for_workers(script: Path) -> None:
    import pickle

    kind = find_target(f"{script}:Data")
    assert pickle.loads(pickle.dumps(kind)) is kind


@pytest.mark.parametrize("target", ["json", "json:", ":dumps", "nowhere/at_all.py:make", "no_such:make"])
def test_target_that_names_nothing_is_refused(target: str) -> None:
    with pytest.raises(BadTargetError):
        find_target(target)


def test_name_that_is_missing_is_refused(script: Path) -> None:
    with pytest.raises(BadTargetError, match=r"has no Data\.load"):
        find_target(f"{script}:Data.load")


def test_missing_dependency_of_a_script_is_its_own_error(tmp_path: Path) -> None:
    path = tmp_path / "needs.py"
    path.write_text("import no_such_dependency\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        find_target(f"{path}:make")


def test_error_is_explained_with_the_scripts_line(tmp_path: Path) -> None:
    path = tmp_path / "raises.py"
    path.write_text("def make():\n    return {}['weights']\n")
    with pytest.raises(KeyError) as caught:
        find_target(f"{path}:make")()
    assert explain(caught.value) == "KeyError: 'weights' at raises.py:2"


def test_error_of_a_loaders_worker_is_its_last_line() -> None:
    text = (
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "x.py", line 3\nValueError: no sample 7\n'
    )
    assert explain(ValueError(text)) == "ValueError: no sample 7"


def test_error_without_a_text_has_its_class() -> None:
    assert explain(KeyboardInterrupt()).startswith("KeyboardInterrupt")
