"""Nothing in Hoop executes bytes that others can send or store: no pickle, no eval, no unsafe loader.

What unpickles without naming it counts too: pipes and queues of ``multiprocessing``, PyTorch's object collectives.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
PIPES = {"multiprocessing", "torch.multiprocessing", "concurrent.futures.process"}
"""Modules whose connections, queues and pools unpickle what they receive."""
HARMLESS = {"multiprocessing.util"}
ALLOWED = {
    "hoop/runs/by_value.py": "objects of hoop.train, for processes that it starts itself: over a socket pair, or Ray's",
    "hoop/data/worker_pool.py": "samples of a forked worker, over a pipe that no other process has",
    "hoop/horovod/operations.py": "objects that Horovod's interface exchanges between the ranks of one program",
}
"""Modules that may load code, each with the reason why nobody else can give them bytes."""
CALLS = {"eval", "exec", "compile", "__import__"}
LOADERS = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("yaml", "load")}
OBJECTS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
"""Functions of ``torch.distributed`` that pickle. Hoop's own ``all_gather_object`` is JSON, and no attribute."""
CANDIDATE = re.compile(
    rf"\b(?:{'|'.join(sorted(MODULES))})\b|(?<![.\w])(?:{'|'.join(sorted(CALLS))})\b|\.\s*load\b"
    rf"|\bmultiprocessing\b|ProcessPoolExecutor|\.\s*(?:{'|'.join(sorted(OBJECTS))})\b|read_pickle"
)
"""In the text of each module that loads code; the others are not parsed, which takes seconds for all of them."""


def code_loaders(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything that could execute the data it reads."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names) if any(one.name in PIPES for one in names):
                yield node.lineno, "multiprocessing"
            case ast.ImportFrom(module=str(module), names=names) if is_pipe(module, [one.name for one in names]):
                yield node.lineno, module
            case ast.Call(func=ast.Attribute(attr=name)) if name in OBJECTS | {"read_pickle"}:
                yield node.lineno, name
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


def is_pipe(module: str, names: list[str]) -> bool:
    """Whether an import from this module brings what unpickles messages of other processes."""
    if module in HARMLESS:
        return False
    return module.startswith(("multiprocessing", "torch.multiprocessing")) or "ProcessPoolExecutor" in names


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
        "from multiprocessing.connection import Listener",
        "import torch.multiprocessing as multiprocessing",
        "from concurrent.futures import ProcessPoolExecutor",
        "dist.recv_object_list(values, src=0)",
    ],
)
def test_a_code_loader_is_found(line: str) -> None:
    assert CANDIDATE.search(line)
    assert list(code_loaders(ast.parse(line)))


def test_the_modules_that_may_load_code_do() -> None:
    """A module that no longer does leaves the table."""
    assert all(list(code_loaders(ast.parse((SRC / path).read_text("utf-8")))) for path in ALLOWED)
