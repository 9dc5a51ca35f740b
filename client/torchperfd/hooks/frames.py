"""What the call stack and dynamo know of our hooks."""

from collections.abc import Callable
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, TypeVar

from torchperfd.safety.interrupts import is_from_script
from torchperfd.safety.logs import log

F = TypeVar("F", bound=Callable[..., Any])

step_code: set[CodeType] = set()
"""Code that runs while an optimizer steps; the hooks of optimizers and of gradient scalers add to it."""


def inside_step(frame: FrameType | None) -> bool:
    """Return whether an optimizer step is at work in this frame or further up the stack."""
    while frame is not None:
        if frame.f_code in step_code:
            return True
        frame = frame.f_back
    return False


def skip_code(code: CodeType) -> None:
    """Have dynamo run this code without compiling it.

    Raises:
        AttributeError: This torch has no such setting.
    """
    import torch

    dynamo = torch._C._dynamo.eval_frame
    if hasattr(dynamo, "skip_code"):  # before torch 2.7
        dynamo.skip_code(code)
        return
    action = dynamo._FrameAction
    strategy = dynamo._FrameExecStrategy(action.SKIP, action.DEFAULT)
    dynamo.set_code_exec_strategy(code, strategy)


def keep_classes_out_of_graphs(*classes: type) -> None:
    """The same for all methods that hooks call: dynamo would compile one trivial frame for each."""
    for owner in classes:
        for method in vars(owner).values():
            if isinstance(method, FunctionType):
                keep_out_of_graphs(method, inline=True)


def keep_functions_out_of_graphs(module: ModuleType) -> None:
    """The same for all functions of a module of ours."""
    for function in vars(module).values():
        if isinstance(function, FunctionType):
            keep_out_of_graphs(function, inline=True)


def keep_out_of_graphs(function: F, *, inline: bool = False) -> F:
    """Have dynamo run a hook without compiling it where compiled code calls it.

    Otherwise dynamo compiles the hook's frame as well: an extra graph, in which the hook takes
    itself for compiled and stays silent. Where torch has no such setting, nothing happens; the hook
    ``compiler`` is off then.

    Args:
        function: The hook; returned.
        inline: Let it be traced through where the caller's own frame is compiled. Only what
            breaks the graph without us may go without: we must not add a break.
    """
    try:
        skip_code(function.__code__)
    except Exception as error:
        if is_from_script(error):
            raise
        log.debug("this torch cannot keep %s out of compiled graphs", function)
    if not inline:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function
