"""Tests use the product's public surface, so that its private attributes may change."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.node import ROOT

ALLOWED = {
    "os, sys, ctypes, threading, named tuples": {
        "_DummyThread",
        "_current_frames",
        "_exit",
        "_getframe",
        "_obj",
        "_replace",
    },
    "Jupyter calls it to show an object": {"_repr_html_"},
    "torch's: tests check what hooks leave there, or drive torch as it drives itself": {
        "_BaseDataLoaderIter",
        "_C",
        "_autograd",
        "_compiled_call_impl",
        "_dataset_fetcher",
        "_distributed_c10d",
        "_dynamo",
        "_forward_hooks",
        "_forward_pre_hooks",
        "_get_foreach_kernels_supported_devices",
        "_get_fused_kernels_supported_devices",
        "_global_optimizer_post_hooks",
        "_global_optimizer_pre_hooks",
        "_next_data",
        "_num_yielded",
        "_parse_kineto_results",
        "_pin_memory",
        "_prepare_trace",
        "_replicate_for_data_parallel",
        "_send_idx",
        "_start_trace",
    },
    "fastai's and Lightning's: what our callbacks and launcher change": {
        "_basic_subprocess_cmd",
        "_raw_values",
    },
}
"""Private names of others that tests may read, by the reason."""


def private_reads(path: Path) -> Iterator[str]:
    """Yield the private attributes that a file reads of anything but ``self`` and ``cls``."""
    allowed = set().union(*ALLOWED.values())
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.endswith("__"):
            continue
        own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
        if not own and node.attr not in allowed:
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


def test_tests_read_no_private_attributes() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert files
    assert [read for path in files for read in private_reads(path)] == []


def commands_taken(path: Path) -> Iterator[str]:
    """Yield where a file takes a command from its module, and not from the program."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ImportFrom(module=str(module), names=names, lineno=line):
                taken = ".commands." in module and any(each.name == "command" for each in names)
            case ast.Call(func=ast.Attribute(attr="invoke"), args=[first, *_], lineno=line):
                taken = isinstance(first, ast.Attribute) and first.attr == "command"
            case _:
                continue
        if taken:
            yield f"{path.relative_to(ROOT)}:{line}"


def test_tests_run_commands_as_the_program_does() -> None:
    # click keeps a command's help option from its first call on: without the program, "-h" is missing
    # for the rest of the process.
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert [taken for path in files for taken in commands_taken(path)] == []
