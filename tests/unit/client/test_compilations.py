"""Compilations are counted once the script has the compiler, which is never imported for that."""

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from torchperfd.hooks.compiler import Compilations
from torchperfd.link.wire import totals_from_message, totals_to_message
from torchperfd.model.totals import PhaseTotals
from torchperfd.steps.phases import PhaseNames
from torchperfd.steps.totals import Totals

MODULE = "torch._dynamo.callback"
Callbacks = list[Callable[..., None]]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a compiler that calls back by command."""
    handler = SimpleNamespace(start_callbacks=[], end_callbacks=[])
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(callback_handler=handler))
    return handler


def compiles(callbacks: Callbacks, *arguments: object) -> None:
    for callback in callbacks:
        callback(*arguments)


def ticking(*times: int) -> Callable[[], int]:
    left: Iterator[int] = iter(times)
    return lambda: next(left)


def test_compilations_are_counted_with_and_without_arguments(compiler: SimpleNamespace) -> None:
    compilations = Compilations(ticking(100, 150, 1000, 1007))
    compilations.follow()
    compilations.follow()
    compiles(compiler.start_callbacks)
    compiles(compiler.end_callbacks)
    compiles(compiler.start_callbacks, "why")
    compiles(compiler.end_callbacks, "why")
    assert (compilations.calls, compilations.ns) == (2, 57)


def test_one_that_was_under_way_when_we_came_is_not_counted(compiler: SimpleNamespace) -> None:
    compilations = Compilations(ticking(5))
    compilations.follow()
    compiles(compiler.end_callbacks)
    assert (compilations.calls, compilations.ns) == (0, 0)


def test_compiler_reset_restores_callbacks_leaving_none_behind(compiler: SimpleNamespace) -> None:
    compilations = Compilations()
    theirs: Callbacks = [lambda: None]
    compiler.start_callbacks += theirs
    compilations.follow()
    assert (len(compiler.start_callbacks), len(compiler.end_callbacks)) == (2, 1)
    compiler.start_callbacks[1:], compiler.end_callbacks[:] = [], []
    compilations.follow()
    assert (len(compiler.start_callbacks), len(compiler.end_callbacks)) == (2, 1)
    compilations.uninstall()
    compilations.follow()
    assert (compiler.start_callbacks, compiler.end_callbacks) == (theirs, [])


def test_without_a_compiler_or_with_another_kind_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (None, SimpleNamespace(), SimpleNamespace(callback_handler=SimpleNamespace())):
        monkeypatch.setitem(sys.modules, MODULE, module)
        compilations = Compilations()
        compilations.follow()
        compilations.uninstall()
        assert compilations.calls == 0


def test_the_real_compiler_calls_back_at_every_new_shape() -> None:
    script = """
import sys, torch
from torchperfd.hooks.compiler import Compilations
compilations = Compilations()
compilations.follow()
assert "torch._dynamo" not in sys.modules
square = torch.compile(lambda x: x * x, backend="eager", dynamic=False)
compilations.follow()
for size in (2, 3, 3, 4):
    square(torch.ones(size))
print(compilations.calls, compilations.ns > 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["3", "True"], done.stderr


def test_totals_carry_compilations() -> None:
    totals, names = Totals(compiled=PhaseTotals(4, 9_000)), PhaseNames()
    packed = totals_to_message(totals, names, 0, {}).account
    assert totals_from_message(packed, names).compiled == PhaseTotals(4, 9_000)
    assert not totals_to_message(Totals(), names, 0, {}).account.HasField("compiled")


def test_limit_of_graphs_names_the_function(
    compiler: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "torch._dynamo.convert_frame"
    monkeypatch.setitem(sys.modules, module, SimpleNamespace())
    log = logging.getLogger(module)
    # Of clients that other tests have left attached.
    before = [*log.filters]
    compilations = Compilations()
    compilations.follow()
    compilations.follow()
    log.warning("something else about %s", "'forward' (/a/model.py:3)")
    assert compilations.graph_limit == ""
    message = "torch._dynamo hit config.%s (%s)\n   function: %s\n   last reason: %s"
    log.warning(message, "recompile_limit", 8, "'forward' (/a/model.py:12)", "0/7: tensor 'x' size mismatch")
    log.warning(message, "recompile_limit", 8, "'other' (/a/model.py:40)", "why")
    assert compilations.graph_limit == "forward() at model.py:12"
    compilations.uninstall()
    assert log.filters == before
