"""What arrives from elsewhere is data: nothing in Hoop can turn bytes into code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__"}
LOADERS = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("yaml", "load")}


def ways_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of whatever would run what it reads."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, one.name) for one in names if one.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                yield node.lineno, module
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                yield node.lineno, name
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name), keywords=keywords):
                safe = any(one.arg in ("weights_only", "allow_pickle") for one in keywords)
                if (owner, name) in LOADERS and not safe:
                    yield node.lineno, f"{owner}.{name}"


def test_nothing_reads_code() -> None:
    found = [
        f"{path}:{line}: {name}"
        for path in sorted((SRC / "hoop").rglob("*.py"))
        for line, name in ways_in(ast.parse(path.read_text("utf-8")))
    ]
    assert found == []


@pytest.mark.parametrize("line", ["import pickle", "from dill import loads", "eval(x)", "torch.load(f)", "np.load(f)"])
def test_the_rule_sees(line: str) -> None:
    assert list(ways_in(ast.parse(line)))
