"""Nothing in Hoop executes bytes that others can send or store: no pickle, no eval, no unsafe loader."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
ALLOWED = {
    "hoop/runs/by_value.py": "objects of hoop.train, for processes that it starts itself: over a socket pair, or Ray's",
}
"""Modules that may load code, each with the reason why nobody else can give them bytes."""
CALLS = {"eval", "exec", "compile", "__import__"}
LOADERS = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("yaml", "load")}
CANDIDATE = re.compile(rf"\b(?:{'|'.join(sorted(MODULES))})\b|(?<![.\w])(?:{'|'.join(sorted(CALLS))})\b|\.\s*load\b")
"""In the text of each module that loads code; the others are not parsed, which takes seconds for all of them."""


def code_loaders(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything that could execute the data it reads."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, one.name) for one in names if one.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                yield node.lineno, module
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                yield node.lineno, name
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name), keywords=keywords):
                given = {one.arg: ast.unparse(one.value) for one in keywords}
                safe = given.get("weights_only") == "True" or given.get("allow_pickle") == "False"
                if (owner, name) in LOADERS and not safe:
                    yield node.lineno, f"{owner}.{name}"


def test_no_module_loads_code() -> None:
    texts = [(path, path.read_text("utf-8")) for path in sorted((SRC / "hoop").rglob("*.py"))]
    found = [
        f"{path}:{line}: {name}"
        for path, text in texts
        if CANDIDATE.search(text) and path.relative_to(SRC).as_posix() not in ALLOWED
        for line, name in code_loaders(ast.parse(text))
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from dill import loads",
        "eval(x)",
        "torch.load(f)",
        "np.load(f)",
        "np.load(f, allow_pickle=True)",
        "torch.load(f, weights_only=False)",
    ],
)
def test_a_code_loader_is_found(line: str) -> None:
    assert CANDIDATE.search(line)
    assert list(code_loaders(ast.parse(line)))
