"""The mutants of a module: its text with one small change in what it does."""

import ast
from collections.abc import Iterator
from itertools import accumulate
from textwrap import shorten
from typing import Any, Final, NamedTuple

_OPPOSITES: Final = (
    *((ast.Lt, ast.GtE), (ast.Gt, ast.LtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.FloorDiv, ast.Mod), (ast.And, ast.Or)),
)
_NEIGHBOURS: Final = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE))  # comparisons that differ at the boundary only
_NOT_EXECUTED: Final = {"annotation", "returns", "decorator_list"}


class Mutant(NamedTuple):
    """One change of one module; its owner is the function, class or constant that has it."""

    path: str
    line: int
    owner: str
    change: str
    source: str


def mutants(path: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a module, in the order of its text."""
    text = source.encode()
    starts = [0, *accumulate(map(len, text.splitlines(keepends=True)))]
    for statement in ast.parse(source).body:
        target = next(iter(getattr(statement, "targets", ())), getattr(statement, "target", None))
        owner = str(getattr(statement, "name", getattr(target, "id", "")))
        for node in _executed(statement):
            before = text[: starts[node.lineno - 1] + node.col_offset]
            after = text[starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0) :]
            for changed in _changed(node):
                new = ast.unparse(changed)
                # The parentheses keep the order of evaluation.
                spliced = f"({new})" if isinstance(changed, ast.expr) else new
                change = f"{shorten(ast.unparse(node), 60)} -> {shorten(new, 60)}"
                yield Mutant(path, node.lineno, owner, change, (before + spliced.encode() + after).decode())


def _executed(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield the nodes of a tree that are worth a test: not annotations, texts and logging."""
    match node:
        # Python 3.11 gives what is in an f-string no place of its own.
        case ast.JoinedStr() | ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="log")))):
            return
        case ast.expr() | ast.stmt():
            yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in _NOT_EXECUTED:
                yield from _executed(child)


def _changed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a node becomes in each of its mutants."""
    match node:
        case ast.Compare(left=left, ops=[*ops], comparators=comparators):
            for place, operator in enumerate(ops):
                for other in _others(operator):
                    yield ast.Compare(left, [*ops[:place], other, *ops[place + 1 :]], comparators)
        case ast.BinOp(left=left, op=operator, right=right):
            yield from (ast.BinOp(left, other, right) for other in _others(operator))
        case ast.BoolOp(op=operator, values=values):
            yield from (ast.BoolOp(other, values) for other in _others(operator))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield ast.Constant(2 * value or 1.0)
        case ast.Return(value=ast.expr() as returned) if not isinstance(returned, ast.Constant):
            yield ast.Return(ast.Constant(None))
        case (
            ast.Expr(value=ast.Call() | ast.Await())
            | ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_])
            | (ast.AugAssign() | ast.Delete() | ast.Raise() | ast.Continue() | ast.Break())
        ):
            yield ast.Pass()


def _others(operator: ast.AST) -> Iterator[Any]:
    """Yield what an operator becomes: its opposite, and of a comparison its neighbour at the boundary."""
    for one, other in (*_OPPOSITES, *_NEIGHBOURS):
        if isinstance(operator, one | other):
            yield other() if isinstance(operator, one) else one()
