"""Files of the package are short and have specific names; its functions are short and have few parameters."""

from __future__ import annotations

import ast
import functools
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hoop.cli.commands import COMMANDS

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "hoop"
MAX_LINES = 900
"""A longer file should be split by topic. A class is never split over two files to stay below the limit."""
REPORTED_LINES = 500
"""A longer file appears in the summary of warnings, as a reminder to ask whether it is still about one topic."""
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "common", "misc"}
"""Names that do not say what the file contains."""
MAX_BODY = 70
"""A function with a longer body does more than one thing. Its signature and docstrings do not count: they declare."""
REPORTED_BODY = 60
"""A longer body appears in the summary of warnings."""
MAX_PARAMETERS = 7
"""Without ``self``, ``cls``, ``*args`` and ``**options``. The parameters of a command are its options: any number."""
EXCEPTIONS = {
    "runs/api.py: train": "the public interface, hoop.train: keyword-only options",
    "elastic/run.py: Run.__init__": "the public interface, hoop.elastic.Run: keyword-only options",
    "simulate/simulation.py: simulate": "the simulator's interface: options with defaults, one each",
    "simulate/search.py: search": "the simulator's interface: options with defaults, one each",
    "simulate/search.py: _simulate_candidate": "passes on the options of search, for one candidate",
    "simulate/cost_model.py: Costs.uniform": "the figures of one block, by keyword",
    "simulate/instruction_cost.py: ReductionCosts.__init__": "what one sum depends on: ranks, shards, sizes, machine",
    "engine/cost_probe.py: measure_costs": "what a profile is made of: model, data, loss, optimizer, sizes",
    "horovod/collectives.py: allreduce": "Horovod's signature",
    "horovod/collectives.py: grouped_allreduce": "Horovod's signature",
    "horovod/collectives.py: grouped_allreduce_async_": "Horovod's signature",
    "horovod/optimizer.py: DistributedOptimizer": "Horovod's signature",
    "wire/frames.py: pack_header": "the fields of a frame, packed for every message: an object for them costs more",
}
"""Functions with more parameters, by file and name, each with the reason."""


def modules(package: Path) -> Iterator[Path]:
    """Every file that is not generated."""
    return (path for path in sorted(package.rglob("*.py")) if "generated" not in path.relative_to(package).parts)


def long_files(package: Path, most: int) -> list[str]:
    lengths = ((path, len(path.read_text("utf-8").splitlines())) for path in modules(package))
    return [f"{path}: {lines} lines, above {most}" for path, lines in lengths if lines > most]


def vaguely_named_files(package: Path) -> list[str]:
    """Files with a vague name, such as ``utils``, or in a folder with one."""
    return [
        f"{path}: named after nothing; name it after what it holds"
        for path in modules(package)
        if VAGUE_NAMES & {part.strip("_") for part in path.relative_to(package).with_suffix("").parts}
    ]


@dataclass(frozen=True)
class Function:
    """A function or method of the package."""

    path: Path
    line: int
    name: str
    """Qualified by classes and functions around it."""
    body: int
    """Lines from the first statement to the last, without strings that are statements: docstrings."""
    parameters: int

    def key(self, package: Path) -> str:
        return f"{self.path.relative_to(package).as_posix()}: {self.name}"

    def is_command(self, package: Path) -> bool:
        """Whether it is a command of ``hoop``: the function of this name in the module of this name."""
        return self.name in COMMANDS and self.path == package / "cli" / f"{self.name}.py"


@functools.cache
def functions(package: Path) -> tuple[Function, ...]:
    """Every function of the package, also those inside others. Read once: several tests need them."""

    def walk(node: ast.AST, path: Path, around: str) -> Iterator[Function]:
        for child in _statements(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                name = around + child.name
                yield Function(path, child.lineno, name, _body_lines(child), _num_parameters(child))
                yield from walk(child, path, f"{name}.")
            else:
                yield from walk(child, path, f"{around}{child.name}." if isinstance(child, ast.ClassDef) else around)

    return tuple(
        found for path in modules(package) for found in walk(ast.parse(path.read_text("utf-8"), str(path)), path, "")
    )


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements directly in a node, and its handlers and cases. An expression, most of a file, has none."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        found = getattr(node, name, ())
        yield from found if isinstance(found, list) else ()


def _body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    declared: set[int] = set()
    remaining: list[ast.AST] = [function]
    while remaining:
        remaining += _statements(node := remaining.pop())
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                declared.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    first, last = function.body[0].lineno, function.end_lineno or function.lineno
    return len(set(range(first, last + 1)) - declared)


def _num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = [*function.args.posonlyargs, *function.args.args]
    bound = bool(given) and given[0].arg in ("self", "cls")
    return len(given) + len(function.args.kwonlyargs) - bound


def long_functions(package: Path, most: int) -> list[str]:
    return [
        f"{one.path}:{one.line}: {one.name}: a body of {one.body} lines, above {most}"
        for one in functions(package)
        if one.body > most
    ]


def wide_functions(package: Path, most: int, exceptions: Collection[str] = ()) -> list[str]:
    """Functions with more parameters; neither commands nor exceptions."""
    return [
        f"{one.path}:{one.line}: {one.name}: {one.parameters} parameters, above {most}"
        for one in functions(package)
        if one.parameters > most and not one.is_command(package) and one.key(package) not in exceptions
    ]


@pytest.mark.filterwarnings("default")
def test_files_are_short() -> None:
    for reported in long_files(PACKAGE, REPORTED_LINES):
        warnings.warn(reported, stacklevel=1)
    long = long_files(PACKAGE, MAX_LINES)
    assert not long, "\n" + "\n".join(long)


def test_files_have_specific_names() -> None:
    found = vaguely_named_files(PACKAGE)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.filterwarnings("default")
def test_functions_are_short() -> None:
    for reported in long_functions(PACKAGE, REPORTED_BODY):
        warnings.warn(reported, stacklevel=1)
    long = long_functions(PACKAGE, MAX_BODY)
    assert not long, "\n" + "\n".join(long)


def test_functions_have_few_parameters() -> None:
    wide = wide_functions(PACKAGE, MAX_PARAMETERS, EXCEPTIONS)
    assert not wide, "\n" + "\n".join(wide)


def test_every_exception_is_needed() -> None:
    wide = {one.key(PACKAGE) for one in functions(PACKAGE) if one.parameters > MAX_PARAMETERS}
    unneeded = sorted(set(EXCEPTIONS) - wide)
    assert not unneeded, f"at most {MAX_PARAMETERS} parameters, or not there: remove from EXCEPTIONS {unneeded}"


def test_a_long_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("x = 1\n" * 901)
    (tmp_path / "short.py").write_text("x = 1\n" * 900)
    (tmp_path / "generated").mkdir()
    (tmp_path / "generated" / "long_pb2.py").write_text("x = 1\n" * 901)
    assert long_files(tmp_path, 900) == [f"{tmp_path / 'long.py'}: 901 lines, above 900"]


def test_a_vague_name_is_reported(tmp_path: Path) -> None:
    (tmp_path / "helpers").mkdir()
    for name in ("utils.py", "_common.py", "arena.py", "helpers/ring.py"):
        (tmp_path / name).touch()
    assert [Path(found.split(":")[0]).name for found in vaguely_named_files(tmp_path)] == [
        "_common.py",
        "ring.py",
        "utils.py",
    ]


def test_a_long_body_is_reported(tmp_path: Path) -> None:
    lines = ["class Ring:", "    def run(", "        self,", "    ) -> None:", '        """What', '        it does."""']
    lines += [
        "        x = 1",
        '        """What x is."""',
        "",
        "        # why",
        "        def inner():",
        "            y = 1",
    ]
    (tmp_path / "ring.py").write_text("\n".join(lines) + "\n")
    assert long_functions(tmp_path, 5) == []
    assert long_functions(tmp_path, 4) == [f"{tmp_path / 'ring.py'}:2: Ring.run: a body of 5 lines, above 4"]
    assert [one.name for one in functions(tmp_path)] == ["Ring.run", "Ring.run.inner"]


def test_many_parameters_are_reported(tmp_path: Path) -> None:
    (tmp_path / "cli").mkdir()
    wide = "def {name}({first}a, b, /, c, *args, d, **more): ...\n"
    (tmp_path / "cli" / "train.py").write_text(wide.format(name="train", first="") + wide.format(name="_run", first=""))
    methods = (
        "    " + wide.format(name="method", first="self, ") + "    async " + wide.format(name="other", first="cls, ")
    )
    (tmp_path / "train.py").write_text(wide.format(name="train", first="") + "class Ring:\n" + methods)
    assert wide_functions(tmp_path, 4) == []
    assert wide_functions(tmp_path, 3, exceptions={"train.py: Ring.other"}) == [
        f"{tmp_path / 'cli' / 'train.py'}:2: _run: 4 parameters, above 3",
        f"{tmp_path / 'train.py'}:1: train: 4 parameters, above 3",
        f"{tmp_path / 'train.py'}:3: Ring.method: 4 parameters, above 3",
    ]
