"""No import of a test uses CUDA: other tests fork ranks from the same process, in which CUDA then does not work."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
CALLS = {"is_available", "device_count", "init"}


def calls_at_import(node: ast.AST) -> Iterator[ast.Call]:
    """The calls of ``torch.cuda`` and ``torch.accelerator`` outside of functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in child.decorator_list:
                yield from calls_at_import(ast.Expr(decorator))
        elif isinstance(child, ast.Lambda):
            continue
        else:
            match child:
                case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="cuda" | "accelerator"), attr=name)):
                    if name in CALLS:
                        yield child
            yield from calls_at_import(child)


def test_no_import_of_a_test_uses_cuda() -> None:
    found = [
        f"{path}:{call.lineno}: {ast.unparse(call)}; ask tests/gpus.py"
        for path in sorted(TESTS.rglob("*.py"))
        for call in calls_at_import(ast.parse(path.read_text("utf-8")))
    ]
    assert found == []


def test_such_a_call_is_found() -> None:
    text = "@skipif(not torch.cuda.is_available())\ndef test(): torch.cuda.init()\nN = torch.cuda.device_count()"
    assert [call.lineno for call in calls_at_import(ast.parse(text))] == [1, 3]
