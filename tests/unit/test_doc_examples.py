"""Python in the documentation: it compiles, and what it names of torchperfd exists with its arguments."""

import ast
import contextlib
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.node import ROOT

import torchperfd
from torchperfd import Client

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "deploy").rglob("*.md"))]
_BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_VALUES: dict[str, Any] = {"torchperfd": torchperfd, "client": Client}
"""What the names in examples are. A call of a method of Client is checked on the class."""


def blocks(page: Path) -> Iterator[str]:
    for match in _BLOCK.finditer(page.read_text()):
        yield textwrap.dedent(match[2])


EXAMPLES = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, block in enumerate(blocks(page))
]


def problems(source: str) -> list[str]:
    """Return what an example names of torchperfd that does not exist, or does not take such an argument."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchperfd"):
            defined = names_of(node.module or "")
            imported = {each.name: f"{node.module}.{each.name}" for each in node.names}
            found += [path for name, path in imported.items() if name not in defined and not is_module(path)]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in _VALUES:
            owner = _VALUES[node.value.id]
            if node.attr not in dir(owner) and not is_module(f"torchperfd.{node.attr}"):
                found.append(f"{node.value.id}.{node.attr}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found += wrong_arguments(node, node.func)
    return found


def wrong_arguments(call: ast.Call, function: ast.Attribute) -> Iterator[str]:
    """Yield the keywords of a call of ``torchperfd.…`` or ``client.…`` that it does not take."""
    if not (isinstance(function.value, ast.Name) and function.value.id in _VALUES):
        return
    known: Callable[..., Any] | None = getattr(_VALUES[function.value.id], function.attr, None)
    if inspect.isfunction(known):
        taken = inspect.signature(known).parameters
        for keyword in call.keywords:
            if keyword.arg is not None and keyword.arg not in taken:
                yield f"{function.attr}({keyword.arg}=)"


def is_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def names_of(module: str) -> set[str]:
    """Return the names that a module defines, without importing it: its framework may be missing."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return set()
    names = {name for name in dir(torchperfd) if module == "torchperfd"}
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {each.asname or each.name for each in node.names}
    return names


@pytest.mark.parametrize("source", EXAMPLES)
def test_example_compiles_and_names_what_exists(source: str) -> None:
    compile(source, "example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert problems(source) == []


def test_pages_have_examples_at_all() -> None:
    assert len(EXAMPLES) >= 15


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("import torchperfd\ntorchperfd.attached()", ["torchperfd.attached"]),
        ("client.capture(stepz=5)", ["capture(stepz=)"]),
        ("from torchperfd.loggers import WandLogger", ["torchperfd.loggers.WandLogger"]),
        ("torchperfd.attach(loggers=[])\nclient.phase('a')", []),
    ],
)
def test_problems_of_an_example_are_found(source: str, wrong: list[str]) -> None:
    assert problems(source) == wrong


def scripts(folder: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the scripts in strings that import torchperfd, each with its place."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        if path == Path(__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Constant(value=str(text), lineno=line) if "from torchperfd" in text:
                    with contextlib.suppress(SyntaxError):
                        yield f"{path.relative_to(ROOT)}:{line}", ast.parse(textwrap.dedent(text))


def missing_names(script: ast.Module) -> Iterator[str]:
    """Yield what a script imports of torchperfd, or reads of a module of it, and does not exist."""
    modules: dict[str, Any] = {}
    for node in ast.walk(script):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchperfd"):
            package = importlib.import_module(node.module or "")
            for each in node.names:
                if not hasattr(package, each.name) and each.name != "*":
                    with contextlib.suppress(ImportError):
                        importlib.import_module(f"{node.module}.{each.name}")
                found = getattr(package, each.name, None)
                if inspect.ismodule(found):
                    modules[each.asname or each.name] = found
                elif found is None and each.name != "*":
                    yield f"{node.module}.{each.name}"
    for node in ast.walk(script):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in modules:
                if not hasattr(modules[name], attribute):
                    yield f"{name}.{attribute}"


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_scripts_in_strings_name_what_exists(folder: str) -> None:
    """Only slow tests run most of them; a name that has moved shall be seen at once."""
    found = [(place, name) for place, script in scripts(folder) for name in missing_names(script)]
    assert found == []
