"""Waiting for ``import torch``, with a torch of three lines, each time in a fresh interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest


class Interpreter:
    """Runs scripts where ``import torch`` finds a package that says when it is executed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.torch("print('torch runs')\nimport torch.nn")
        (directory / "torch/nn.py").write_text("")

    def torch(self, source: str) -> None:
        (self.directory / "torch").mkdir(exist_ok=True)
        (self.directory / "torch/__init__.py").write_text(source)

    def __call__(self, source: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", PREAMBLE + source],
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout.splitlines()


PREAMBLE = """
import sys
from torchperfd.hooks.patches import ModuleImport, when_imported

def waiting():
    return any(isinstance(finder, ModuleImport) for finder in sys.meta_path)

def action():
    print("action runs,", "torch.nn" in sys.modules and "after torch", flush=True)

"""


@pytest.fixture
def python(tmp_path: Path) -> Interpreter:
    return Interpreter(tmp_path)


def test_the_action_runs_right_after_the_import_and_once(python: Interpreter) -> None:
    assert python("""
pending = when_imported('torch', action)
print(pending is not None, waiting())
import json, torch, torch.nn
print("next line")
import torch
print(waiting())
""") == ["True True", "torch runs", "action runs, after torch", "next line", "False"]


def test_the_action_runs_at_once_where_torch_is_there(python: Interpreter) -> None:
    assert python("""
import torch
print(when_imported('torch', action), waiting())
""") == ["torch runs", "action runs, after torch", "None False"]


def test_importing_a_submodule_is_importing_torch(python: Interpreter) -> None:
    assert python("""
when_imported('torch', action)
from torch.nn import __name__ as name
print(name, waiting())
""") == ["torch runs", "action runs, after torch", "torch.nn False"]


def test_module_after_import_has_no_trace_of_the_finder(python: Interpreter) -> None:
    facts = """
def show(module):
    spec = module.__spec__
    print(type(module.__loader__), module.__loader__ is spec.loader, spec.name, spec.origin, module.__file__)
    print(spec.submodule_search_locations, spec.has_location, spec.parent, spec.cached)
    print([getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path])
"""
    plain = python(facts + "import torch; show(torch)")
    assert python(facts + "when_imported('torch', lambda: None); import torch; show(torch)") == plain


def test_it_already_does_while_torch_runs(python: Interpreter) -> None:
    python.torch("print(type(__loader__).__name__, type(__spec__.loader).__name__)")
    assert python("when_imported('torch', lambda: None); import torch") == [
        "SourceFileLoader SourceFileLoader",
    ]


def test_asking_whether_there_is_a_torch_is_not_importing_it(python: Interpreter) -> None:
    """As transformers and others do before they import it."""
    assert python("""
import importlib.util
when_imported('torch', action)
for _ in range(2):
    spec = importlib.util.find_spec("torch")
    print(spec.name, spec.origin.endswith("torch/__init__.py"), spec.loader.is_package("torch"))
import torch
print("next line")
print(waiting(), type(torch.__loader__).__name__)
""") == [
        "torch True True",
        "torch True True",
        "torch runs",
        "action runs, after torch",
        "next line",
        "False SourceFileLoader",
    ]


def test_a_torch_that_breaks_breaks_as_without_us(python: Interpreter) -> None:
    python.torch("raise OSError('no libcudart')")
    said = python("""
when_imported('torch', action)
for _ in range(2):
    try:
        import torch
    except OSError as error:
        print(error, "torch" in sys.modules)
""")
    assert said == ["no libcudart False"] * 2


def test_a_torch_that_works_the_second_time_is_noticed(python: Interpreter) -> None:
    python.torch("import os\nif 'AGAIN' not in os.environ: raise OSError\nimport torch.nn")
    assert python("""
import os
when_imported('torch', action)
try:
    import torch
except OSError:
    os.environ["AGAIN"] = "1"
import torch
""") == ["action runs, after torch"]


def test_no_torch_at_all_is_as_without_us(python: Interpreter) -> None:
    (python.directory / "torch/__init__.py").rename(python.directory / "gone.py")
    (python.directory / "torch").rename(python.directory / "gone")
    # The real torch of this environment must not be found either.
    assert python("""
sys.path[:] = [""] + [entry for entry in sys.path if "site-packages" not in entry]
when_imported('torch', action)
import importlib.util
print(importlib.util.find_spec("torch"))
try:
    import torch
except ModuleNotFoundError as error:
    print(error, error.name)
""") == ["None", "No module named 'torch' torch"]


def test_cancelling_ends_the_wait(python: Interpreter) -> None:
    assert python("""
pending = when_imported('torch', action)
pending.cancel()
pending.cancel()
print(waiting())
import torch
""") == ["False", "torch runs"]


def test_cancel_after_torch_was_found_still_counts(python: Interpreter) -> None:
    assert python("""
import importlib.util
pending = when_imported('torch', action)
spec = importlib.util.find_spec("torch")
pending.cancel()
module = importlib.util.module_from_spec(spec)
sys.modules["torch"] = module
spec.loader.exec_module(module)
""") == ["torch runs"]


def test_other_imports_are_left_alone(python: Interpreter) -> None:
    (python.directory / "torchvision.py").write_text("print('torchvision runs')")
    assert python("""
when_imported('torch', action)
import torchvision, colorsys
print(waiting())
""") == ["torchvision runs", "True"]


def test_a_finder_that_came_later_still_finds_torch(python: Interpreter) -> None:
    """Editable installs and import hooks of other tools."""
    (python.directory / "torch").rename(python.directory / "hidden")
    assert python("""
import importlib.util
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            return importlib.util.spec_from_file_location("torch", "hidden/__init__.py",
                                                          submodule_search_locations=["hidden"])
when_imported('torch', action)
sys.meta_path.insert(1, Finder())
import torch
""") == ["torch runs", "action runs, after torch"]


def test_torch_import_action_interrupted_keeps_module(python: Interpreter) -> None:
    """A signal handler raises while hooks are put on. That import fails; the next one does not begin anew."""
    said = python("""
calls = []
def action():
    calls.append(sys.modules["torch"])
    if len(calls) == 1:
        raise KeyboardInterrupt
finders = len(sys.meta_path)
when_imported('torch', action)
try:
    import torch
except KeyboardInterrupt:
    print("interrupted")
import torch
print(calls == [torch, torch], len(sys.meta_path) == finders, torch.__spec__.origin[-11:])
""")
    assert said == ["torch runs", "interrupted", "True True __init__.py"]


def test_torch_import_with_two_waits_runs_both_actions(python: Interpreter) -> None:
    lines = python(
        "when_imported('torch', lambda: print('first'))\n"
        "when_imported('torch', lambda: print('second'))\n"
        "import torch\n"
        "print(type(torch.__loader__).__name__, type(torch.__spec__.loader).__name__)\n"
    )
    assert lines == ["torch runs", "first", "second", "SourceFileLoader SourceFileLoader"]
