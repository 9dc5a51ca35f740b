"""The behaviours of ``script.py``, read from its source: it cannot be imported, as it trains."""

import ast
from pathlib import Path
from typing import Final

SCRIPT: Final = Path(__file__).with_name("script.py")


def _behaviours() -> tuple[str, ...]:
    (table,) = (
        node.value
        for node in ast.parse(SCRIPT.read_text()).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "BEHAVIOURS"
    )
    assert isinstance(table, ast.Dict)
    names = [key.value for key in table.keys if isinstance(key, ast.Constant)]
    for part in table.values:
        if isinstance(part, ast.DictComp):
            functions = part.generators[0].iter
            assert isinstance(functions, ast.Tuple)
            names += [each.id for each in functions.elts if isinstance(each, ast.Name)]
    return tuple(map(str, names))


BEHAVIOURS: Final = _behaviours()
