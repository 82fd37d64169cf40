"""Packages of ``src/hoop``, called rooms, import only the rooms that the table allows, and there are no import cycles.

Every import counts: at the top of a file, inside a function, under ``TYPE_CHECKING``, and
``import_module("hoop…")`` with a literal name.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"

ROOT_MODULES = {
    "errors",
    "config",
    "environment",
    "topology",
    "events",
    "files",
    "host_processes",
    "job_events",
    "logs",
    "texts",
    "user_frames",
    "torch_versions",
    "resources",
    "signals",
    "standard_streams",
}
"""Modules directly in ``hoop``: values that all rooms share; they import only the standard library."""

# Each line: a room, then the rooms that it may import, which must be above it. "above": all rooms above it.
# "hoop" is hoop/__init__.py.
TABLE = """
    root
    memory          root
    native          root
    wire            root
    transport       root memory native wire
    collectives     root memory native transport
    plan            root
    membership      root wire plan
    client          root memory wire collectives
    schedulers      root
    models          root
    data            root native
    strategies      root plan
    servers         root memory wire transport collectives membership strategies
    engine          root memory native transport collectives membership models data plan strategies
    simulate        root membership plan strategies collectives
    dashboard       root wire transport client plan strategies
    report          root plan
    launch          root memory wire transport membership servers
    runs            root memory native wire membership client schedulers servers data plan strategies engine simulate report launch
    torch_backend   root memory transport collectives
    horovod         root schedulers launch torch_backend
    elastic         root collectives wire membership client schedulers servers data engine launch runs
    hoop            root client strategies data engine launch runs
    lab             above
    cli             above
    __main__        cli
"""  # noqa: E501

LIGHT_ROOMS = ("memory", "transport", "collectives", "membership", "plan", "simulate", "schedulers")
"""Rooms that load neither torch nor gRPC."""


def read_table(text: str) -> dict[str, set[str]]:
    """The rooms that each room may import. A room that is not above the importing one is an error."""
    table: dict[str, set[str]] = {}
    for line in text.split("\n"):
        room, *allowed = line.split() or [""]
        if room:
            table[room] = set(table) if allowed == ["above"] else set(allowed)
            not_above = sorted(table[room] - (set(table) - {room}))
            assert not not_above, f"{room} may not import {', '.join(not_above)}: not above it in the table"
    return table


ALLOWED_IMPORTS = read_table(TABLE)


def room_of(module: str, src: Path) -> str:
    """``hoop.memory.arena`` is in ``memory``, ``hoop.errors`` in ``root``, ``hoop.connect`` in ``hoop``."""
    name = module.partition(".")[2].partition(".")[0]
    if name in ROOT_MODULES:
        return "root"
    is_module = name in ALLOWED_IMPORTS or (src / "hoop" / name).is_dir() or (src / "hoop" / f"{name}.py").is_file()
    return name if name and is_module else "hoop"


def imported_modules(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every import of a module of this package, also inside functions."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom():
                base = package[: len(package) - node.level + 1] if node.level else []
                origin = ".".join(base + ([node.module] if node.module else []))
                yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


@functools.cache
def imports_in(path: Path, src: Path) -> tuple[tuple[int, str], ...]:
    """``imported_modules`` of a file under ``src``."""
    package = list(path.relative_to(src).parts[:-1])
    return tuple(imported_modules(ast.parse(path.read_text("utf-8"), str(path)), package))


def forbidden_imports(src: Path) -> list[str]:
    """Every import under ``src/hoop`` that the table does not allow."""
    errors = []
    for path in sorted((src / "hoop").rglob("*.py")):
        parts = list(path.relative_to(src).with_suffix("").parts)
        room = "hoop" if parts == ["hoop", "__init__"] else room_of(".".join(parts), src)
        allowed = ALLOWED_IMPORTS.get(room)
        if allowed is None:
            errors.append(f"{path}:1: {room} is not in the table of {Path(__file__).name}")
            continue
        for line, module in imports_in(path, src):
            top = module.split(".")[0]
            target = room_of(module, src) if top == "hoop" else None
            where = f"{path}:{line}: {room} imports {module}"
            if target is None and room == "root" and top not in sys.stdlib_module_names:
                errors.append(f"{where}; root may import root and the standard library")
            elif target is not None and target != room and target not in allowed:
                errors.append(f"{where}; {room} may import {', '.join(sorted(allowed)) or 'no other room'}")
    return errors


def empty_or_unknown_rooms(src: Path) -> list[str]:
    """Rooms without a module, and rooms that are not in the table."""
    rooms = sorted(p for p in (src / "hoop").iterdir() if p.is_dir() and p.name != "__pycache__")
    unknown = [
        f"{room}: not in the table of {Path(__file__).name}" for room in rooms if room.name not in ALLOWED_IMPORTS
    ]
    empty = [
        f"{room}: a room without a module; fill it or remove it"
        for room in rooms
        if all(module.name == "__init__.py" for module in room.rglob("*.py"))
    ]
    return unknown + empty


def heavy_imports(package: str, forbidden: set[str], src: Path) -> set[str]:
    """The forbidden modules that a new interpreter has loaded after it imported every module of the package."""
    program = (
        "import importlib, pkgutil, sys\n"
        f"package = importlib.import_module({package!r})\n"
        f"if {package!r} != 'hoop':\n"
        f"    for found in pkgutil.walk_packages(package.__path__, {package + '.'!r}):\n"
        "        importlib.import_module(found.name)\n"
        f"sys.stdout.write(' '.join({forbidden!r} & set(sys.modules)))\n"
    )
    paths = os.pathsep.join(filter(None, [str(src), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, f"importing {package} failed:\n{done.stderr}"
    return set(done.stdout.split())


def test_imports_follow_the_table() -> None:
    errors = forbidden_imports(SRC)
    assert not errors, "\n" + "\n".join(errors)


def test_every_room_is_in_the_table_and_has_a_module() -> None:
    errors = empty_or_unknown_rooms(SRC)
    assert not errors, "\n" + "\n".join(errors)


@pytest.mark.parametrize("room", [room for room in LIGHT_ROOMS if (SRC / "hoop" / room).is_dir()] or ["memory"])
def test_light_rooms_load_neither_torch_nor_grpc(room: str) -> None:
    assert heavy_imports(f"hoop.{room}", {"torch", "grpc"}, SRC) == set()


def test_import_hoop_does_not_load_torch() -> None:
    assert heavy_imports("hoop", {"torch"}, SRC) == set()


@pytest.mark.parametrize(
    "module",
    [
        "hoop.runs.api",  # it sets OMP_NUM_THREADS and checks the version of PyTorch before it loads PyTorch
        "hoop.engine.entrypoint",  # the same
        "hoop.engine.gradient_slots",  # hoop plan
        "hoop.runs.simulation_report",  # hoop simulate
        "hoop.cli.commands; hoop.cli.commands.command_line()",  # every command
        "hoop.servers.device",
    ],
)
def test_a_command_starts_without_torch(module: str) -> None:
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    paths = os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": paths}, timeout=500, check=False
    )
    assert done.returncode == 0, f"{module} loads torch"


# Tests of the checks: each gets a package that violates it.


def write_package(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "hoop" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("file", "text", "line"),
    [
        ("memory/arena.py", "import hoop.servers.device", 1),
        ("memory/arena.py", "from hoop import wire", 1),
        ("memory/arena.py", "from hoop import connect", 1),
        ("memory/arena.py", "import hoop", 1),
        ("memory/arena.py", "from ..wire import frames", 1),
        ("memory/__init__.py", "from ..wire.frames import Frame", 1),
        ("memory/arena.py", "def f():\n    from hoop.cli.main import app", 2),
        ("memory/arena.py", "if TYPE_CHECKING:\n    from hoop.transport.base import Link", 2),
        ("memory/arena.py", "x = importlib.import_module('hoop.wire')", 1),
        ("errors.py", "import numpy", 1),
        ("events.py", "from hoop.memory import Arena", 1),
        ("__init__.py", "from hoop.servers import device", 1),
        ("__init__.py", "from .servers import device", 1),
        ("servers/device.py", "import os\nfrom hoop.client import connect", 2),
        ("cellar/wine.py", "", 1),
        ("stray.py", "", 1),
    ],
)
def test_a_forbidden_import_is_reported(tmp_path: Path, file: str, text: str, line: int) -> None:
    (found,) = forbidden_imports(write_package(tmp_path, {file: text}))
    assert found.startswith(f"{tmp_path / 'hoop' / file}:{line}: ")


def test_allowed_imports_pass(tmp_path: Path) -> None:
    files = {
        "errors.py": "from __future__ import annotations\nimport enum",
        "config.py": "from hoop import errors\nfrom hoop.errors import HoopError\nfrom . import topology",
        "memory/arena.py": "import numpy\nfrom . import allocator\nfrom hoop.memory.buffers import Buffer",
        "cli/main.py": "import hoop\nfrom hoop.servers import device\nfrom hoop.lab.papers import study",
        "__init__.py": "from hoop.client import connect\nfrom .errors import HoopError",
    }
    assert forbidden_imports(write_package(tmp_path, files)) == []


def test_empty_and_unknown_rooms_are_reported(tmp_path: Path) -> None:
    (tmp_path / "hoop" / "wire").mkdir(parents=True)
    write_package(tmp_path, {"memory/__init__.py": "", "cellar/wine.py": "", "plan/partition.py": ""})
    assert [Path(found.split(":")[0]).name for found in empty_or_unknown_rooms(tmp_path)] == [
        "cellar",
        "memory",
        "wire",
    ]


def test_the_table_rejects_an_import_of_a_room_below() -> None:
    with pytest.raises(AssertionError, match="low may not import high"):
        read_table("root\nlow high\nhigh root")


def test_a_heavy_import_is_found(tmp_path: Path) -> None:
    write_package(tmp_path, {"__init__.py": "", "memory/__init__.py": "", "memory/arena.py": "import colorsys"})
    assert heavy_imports("hoop.memory", {"colorsys", "grpc"}, tmp_path) == {"colorsys"}


# ---- public modules of each room, and import cycles


def module_of(path: Path, src: Path) -> str:
    return ".".join(path.relative_to(src).with_suffix("").parts).removesuffix(".__init__")


def import_graph(src: Path) -> dict[str, set[str]]:
    """The modules that each module under ``src/hoop`` imports, also inside functions."""
    paths = [path for path in sorted((src / "hoop").rglob("*.py")) if "generated" not in path.parts]
    paths_by_module = {module_of(path, src): path for path in paths}
    imports: dict[str, set[str]] = {module: set() for module in paths_by_module}
    for module, path in paths_by_module.items():
        for _, name in imports_in(path, src):
            target = name if name in paths_by_module else name.rpartition(".")[0]
            if target in paths_by_module and target != module:
                imports[module].add(target)
    return imports


def find_cycle(imports: dict[str, set[str]]) -> list[str]:
    """The modules of one import cycle; empty if there is none."""
    visited: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        for target in sorted(imports[module]):
            if target in path:
                return [*path[path.index(target) :], target]
            if target not in visited and (cycle := visit(target, [*path, target])):
                return cycle
        visited.add(module)
        return []

    for module in sorted(imports):
        if module not in visited and (cycle := visit(module, [module])):
            return cycle
    return []


def public_modules(room: Path) -> list[str]:
    """The names in ``PUBLIC`` of a room's ``__init__``."""
    for node in ast.parse((room / "__init__.py").read_text("utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="PUBLIC")], value=ast.Tuple(elts=elements)):
                return [str(one.value) for one in elements if isinstance(one, ast.Constant)]
    return []


def rooms(src: Path) -> list[Path]:
    return sorted(path for path in (src / "hoop").iterdir() if (path / "__init__.py").is_file())


def test_there_are_no_import_cycles() -> None:
    """The ``__init__`` of a package re-exports its modules and is not counted."""
    imports = import_graph(SRC)
    modules = {
        module: {one for one in targets if one.count(".") != 1 or one.split(".")[1] in ROOT_MODULES}
        for module, targets in imports.items()
    }
    assert find_cycle(modules) == []


def test_an_import_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize("room", rooms(SRC), ids=lambda room: room.name)
def test_the_docstring_of_a_room_states_its_allowed_imports(room: Path) -> None:
    docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text("utf-8"))) or ""
    (stated,) = [line for line in docstring.splitlines() if line.startswith("May import: ")]
    allowed = ALLOWED_IMPORTS[room.name] - {"root"}
    names = stated.removeprefix("May import: ").removesuffix(".")
    if names == "every room above it":
        assert ALLOWED_IMPORTS[room.name] == set(ALLOWED_IMPORTS) - set(
            list(ALLOWED_IMPORTS)[list(ALLOWED_IMPORTS).index(room.name) :]
        )
    elif names == "nothing but the modules directly in hoop":
        assert not allowed
    else:
        assert set(names.split()) == allowed


def test_rooms_import_only_public_modules_of_other_rooms() -> None:
    public = {room.name: set(public_modules(room)) for room in rooms(SRC)}
    errors: list[str] = []
    used: dict[str, set[str]] = {name: set() for name in public}
    for module, targets in import_graph(SRC).items():
        for target in targets:
            room, _, name = target.removeprefix("hoop.").partition(".")
            if name and room in public and module.split(".")[1:2] != [room]:
                used[room].add(name)
                if name not in public[room] and target.count(".") > 1 and not (SRC / target.replace(".", "/")).is_dir():
                    errors.append(f"{module} imports {target}, which is not in PUBLIC of hoop.{room}")
    assert not errors, "\n" + "\n".join(errors)
    entry_points = {"torch_backend": {"autoload"}, "cli": {"main"}}
    unused = {name: sorted(public[name] - used[name] - entry_points.get(name, set())) for name in public}
    assert not any(unused.values()), f"in PUBLIC, and imported by no other room: {unused}"
