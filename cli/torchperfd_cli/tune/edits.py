"""The edits that make changes permanent: a unified diff where the calls are found, else sentences."""

import ast
import difflib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torchperfd_cli.tune.trial import (
    AMP,
    COMPILE,
    LOADER,
    MATMUL,
    OPTIMIZER,
    THREADS,
    ZERO_GRAD,
    Change,
    ScriptFacts,
    Site,
)

_DEFAULTS: Final = {"persistent_workers": False, "prefetch_factor": None}
_POSITIONAL: Final = {ZERO_GRAD: "set_to_none", THREADS: "threads"}
"""The only argument of these calls, which may be given by position."""


_Replacement = tuple[int, int, str]
"""First byte and end of what is replaced, and by what."""


@dataclass(frozen=True, slots=True)
class Edits:
    """What to change in the source.

    Attributes:
        diff: Unified diff of all files; empty where no call was found.
        sentences: What the diff does not have.
    """

    diff: str
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Arguments of a call at a line."""

    site: Site
    name: str
    target: str
    values: dict[str, Any]


def suggest_edits(changes: Iterable[Change], facts: ScriptFacts, script: str) -> Edits:
    """Return the edits for changes.

    Args:
        facts: Of the unchanged script, with the lines that make loaders and optimizers.
        script: Path of the script, for what is set once at its start; empty for a module.
    """
    replaced: dict[str, list[_Replacement]] = {}
    sentences: list[str] = []
    for change in changes:
        wanted = _calls(change, facts)
        for each in wanted:
            found = _edit(each)
            if found is None:
                sentences.append(_sentence(change, each))
            else:
                replaced.setdefault(each.site.file, []).extend(found)
        if not wanted:
            line = _added_line(script, change) if change.target in (THREADS, MATMUL) else None
            if line is None:
                sentences.append(_sentence(change, None))
            else:
                replaced.setdefault(script, []).append(line)
    return Edits("".join(_diff(path, each) for path, each in replaced.items()), tuple(sentences))


def _calls(change: Change, facts: ScriptFacts) -> list[_Wanted]:
    values = dict(change.values)
    if change.target == LOADER:
        made = [(each.site, each.name) for each in facts.loaders if not each.is_iterable]
    elif change.target == OPTIMIZER:
        made = [
            (each.site, each.name)
            for each in facts.optimizers
            if each.can_foreach and (each.can_fuse or "fused" not in values)
        ]
    elif change.target == ZERO_GRAD:
        made = [(site, "zero_grad") for site in facts.zeroing]
    elif change.target == THREADS:
        made = [(facts.threads_site, "set_num_threads")]
    else:
        made = []
    sites = dict.fromkeys((site, name) for site, name in made if site is not None)
    return [_Wanted(site, name, change.target, values) for site, name in sites]


def _edit(wanted: _Wanted) -> list[_Replacement] | None:
    """Return how the arguments of a call change; None where it was not found or cannot be changed."""
    text = _read(wanted.site.file)
    call = _find_call(text, wanted)
    return None if call is None else _with_arguments(text, call, wanted)


def _find_call(text: str, wanted: _Wanted) -> ast.Call | None:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and node.lineno <= wanted.site.line <= (node.end_lineno or node.lineno)
        and _called(node) == wanted.name
    ]
    return min(found, key=lambda node: (node.end_lineno or 0) - node.lineno, default=None)


def _called(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _with_arguments(text: str, call: ast.Call, wanted: _Wanted) -> list[_Replacement] | None:
    """Return how a call's arguments are set; None where they may come from elsewhere."""
    if any(keyword.arg is None for keyword in call.keywords):
        return None  # **options may have them
    most_positional = 1 if wanted.target in _POSITIONAL else 5 if wanted.target == LOADER else 6
    if len(call.args) > most_positional or any(isinstance(each, ast.Starred) for each in call.args):
        return None
    data = text.encode()
    starts = _line_starts(data)
    replaced: list[_Replacement] = []
    added: list[str] = []
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    values = dict(wanted.values)
    if wanted.target == OPTIMIZER:
        # Both at once are an error.
        values |= {name: None for name in ("fused", "foreach") if name in given and name not in values}
    if values.get("num_workers") == 0:
        values |= {name: value for name, value in _DEFAULTS.items() if name in given}
    for name, value in values.items():
        node = given.get(name)
        if node is None and wanted.target in _POSITIONAL and call.args:
            node = call.args[0]
        if node is not None:
            replaced.append((*_span(node, starts), repr(value)))
        elif wanted.target == THREADS:
            return None
        else:
            added.append(f"{name}={value!r}")
    if added:
        replaced.append(_insertion(data, call, added, starts))
    return replaced


def _insertion(data: bytes, call: ast.Call, added: Sequence[str], starts: Sequence[int]) -> _Replacement:
    """Return where new arguments go, after the last one that there is, and how they are written."""
    last = max([*call.args, *(keyword.value for keyword in call.keywords)], key=_end, default=None)
    if last is None:
        end = starts[(call.end_lineno or 1) - 1] + (call.end_col_offset or 1) - 1
        return end, end, ", ".join(added)
    end = _span(last, starts)[1]
    # A value in brackets of its own ends after them.
    stop = starts[(call.end_lineno or 1) - 1] + (call.end_col_offset or 1) - 1
    rest = data[end:stop]
    end += rest.find(b")") + 1 if b")" in rest.split(b"#")[0] else 0
    first_line = data[starts[last.lineno - 1] :].split(b"\n", 1)[0]
    if last.lineno > call.lineno and len(call.args) + len(call.keywords) > 1:
        indent = first_line[: len(first_line) - len(first_line.lstrip())].decode()
        return end, end, "".join(f",\n{indent}{each}" for each in added)
    return end, end, "".join(f", {each}" for each in added)


def _added_line(script: str, change: Change) -> _Replacement | None:
    """Return a call below the script's last import; None where it does not import torch by that name."""
    text = _read(script)
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return None
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {
        alias.asname or alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names
    }
    if "torch" not in names:
        return None
    end = _line_starts(text.encode())[imports[-1].end_lineno or imports[-1].lineno]
    return end, end, f"\n{change.code()}\n"


def _sentence(change: Change, wanted: _Wanted | None) -> str:
    if wanted is not None:
        where = f"{_short(wanted.site.file)}:{wanted.site.line}"
        return f"{where}: write {change.code(wanted.name)}"
    if change.target == AMP:
        return f"run the forward pass and the loss under `with {change.code()}:`"
    if change.target == COMPILE:
        return "call model.compile() before the first step"
    if change.target in (THREADS, MATMUL):
        return f"call {change.code()} after torch is imported"
    return f"write {change.code()}, where it is made; that line is not in the script's own code"


def _diff(path: str, replaced: Iterable[_Replacement]) -> str:
    name, before = _short(path), _read(path)
    data = before.encode()
    for begin, end, new in sorted(replaced, reverse=True):
        data = data[:begin] + new.encode() + data[end:]
    lines = difflib.unified_diff(
        before.splitlines(), data.decode().splitlines(), f"a/{name}", f"b/{name}", n=1, lineterm=""
    )
    return "".join(f"{line}\n" for line in lines)


def _short(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8") if path else ""
    except (OSError, UnicodeDecodeError):
        return ""


def _line_starts(data: bytes) -> list[int]:
    starts = [0]
    for line in data.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    return starts


def _span(node: ast.expr, starts: Sequence[int]) -> tuple[int, int]:
    return (
        starts[node.lineno - 1] + node.col_offset,
        starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or node.col_offset),
    )


def _end(node: ast.expr) -> tuple[int, int]:
    return (node.end_lineno or node.lineno, node.end_col_offset or 0)
