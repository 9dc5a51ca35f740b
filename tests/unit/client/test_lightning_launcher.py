"""Ranks that Lightning starts itself: their command becomes one of ``torchperfd run``, in the same run."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchperfd.launch.runner import LightningLauncher
from torchperfd.model.own_commands import script_command

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
