"""Looks at the code of a job before it is executed: who can change it, and whether it declares the job.

The name of a job, ``module:attribute``, comes over the network. Importing a module runs it, so a module is imported
only if its text declares that attribute as a ``Job``: a script that was never meant to be one is not run.
"""

from __future__ import annotations

import ast
import grp
import os
import pwd
import stat
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from hoop.errors import FailedPrecondition, InvalidArgument

# ---- who can change it


def check_writers(path: Path, field: str) -> None:
    """Raise FailedPrecondition if other users than root can change this file or folder, if it exists."""
    try:
        found = path.stat()
    except OSError:
        return
    if reason := _other_writers(found):
        raise FailedPrecondition(
            f"{field}: {path}: {reason}, and devices execute the code there as you; make it yours alone "
            f"(chown {os.geteuid()} {path}; chmod go-w {path}), or name another folder"
        )


def check_path_writers(folder: Path, path: Path, field: str) -> bool:
    """Check the folder of jobs, a module's file in it, and all folders between.

    Returns whether the file may import its neighbours: not if others can add files, as in a sticky folder like /tmp.
    """
    between = [one for one in path.parents if one == folder or folder in one.parents]
    for one in (path, *between):
        check_writers(one, field)
    return not path.parent.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH) or not _is_sticky(path.parent.stat())


def _other_writers(found: os.stat_result) -> str:
    """Why others can change the file or folder; empty: they cannot."""
    if found.st_uid not in (os.geteuid(), 0):
        return f"user {found.st_uid} owns it"
    if _is_sticky(found):  # others add files there, and cannot change this user's: each file is checked
        return ""
    if found.st_mode & stat.S_IWOTH:
        return f"every user can write to it (mode {stat.S_IMODE(found.st_mode):o})"
    if found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_gid):
        return f"group {found.st_gid} can write to it (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def _is_sticky(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and bool(found.st_mode & stat.S_ISVTX)


def _is_private_group(gid: int) -> bool:
    """Whether this user alone is in a group: many systems give each user a group of the same name."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


# ---- whether it declares the job


def find_spec(module: str) -> ModuleSpec | None:
    """Where an installed module is, without executing it or the packages that it is in; None: not on this machine."""
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        folders = None if spec is None else spec.submodule_search_locations
        if spec is not None and folders is None:
            return None
        spec = _find(".".join(parts[:count]), folders)
        if spec is None:
            return None
    return spec


def _find(name: str, folders: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        if (find := getattr(finder, "find_spec", None)) and (spec := find(name, folders)) is not None:
            found: ModuleSpec = spec
            return found
    return None


def check_declared_in_spec(spec: ModuleSpec, attribute: str, name: str) -> None:
    """The same as ``check_declared`` for an installed module."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise InvalidArgument(
            f"job: {name}: {spec.name} is not a Python file ({spec.origin}); name the one with the job"
        )
    check_declared(Path(spec.origin), attribute, name)


def check_declared(path: Path, attribute: str, name: str) -> None:
    """Raise InvalidArgument unless the file declares ``attribute`` as a job, at its top level."""
    if attribute not in declared_jobs(path.read_bytes()):
        raise InvalidArgument(
            f"job: {name} is neither a hoop.Job nor a function that says '-> hoop.Job': {path} was not executed, "
            f"because it does not declare it; write '{attribute} = hoop.Job(…)' or 'def {attribute}() -> hoop.Job:' "
            "there, or name the module that does"
        )


def declared_jobs(source: bytes) -> set[str]:
    """The names that a module declares as jobs: assigned from ``hoop.Job(…)`` or from another job, annotated as one, or
    a function annotated to return one."""
    constructors, functions, jobs = {"Job"}, set[str](), set[str]()
    for node in _top_level(ast.parse(source).body):
        match node:
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] == "hoop":
                constructors |= {alias.asname or alias.name for alias in node.names if alias.name == "Job"}
            case ast.ClassDef() if any(_names_job(base, constructors) for base in node.bases):
                constructors.add(node.name)
            case ast.FunctionDef() if node.returns is not None and _names_job(node.returns, constructors):
                functions.add(node.name)
            case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr()):
                if _names_job(node.annotation, constructors) or _is_job(node.value, constructors, functions, jobs):
                    jobs.add(target)
            case ast.Assign() if _is_job(node.value, constructors, functions, jobs):
                jobs |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return jobs | functions


def _top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, with those in its ``if``, ``try`` and ``with`` blocks."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _top_level(node.body)
            yield from _top_level(getattr(node, "orelse", []))
            for handler in getattr(node, "handlers", []):
                yield from _top_level(handler.body)
            yield from _top_level(getattr(node, "finalbody", []))


def _names_job(node: ast.expr, constructors: set[str]) -> bool:
    """Whether an expression is the class ``Job``: ``Job``, ``hoop.Job``, or either as text."""
    match node:
        case ast.Name(id=name):
            return name in constructors
        case ast.Attribute(attr=name):
            return name == "Job"
        case ast.Constant(value=str(text)):
            return text.rpartition(".")[2] in constructors
    return False


def _is_job(node: ast.expr | None, constructors: set[str], functions: set[str], jobs: set[str]) -> bool:
    match node:
        case ast.Name(id=name):
            return name in jobs
        case ast.IfExp(body=one, orelse=other):
            return all(_is_job(each, constructors, functions, jobs) for each in (one, other))
        case ast.Call(func=ast.Name(id="replace") | ast.Attribute(attr="replace"), args=[first, *_]):
            return _is_job(first, constructors, functions, jobs)  # dataclasses.replace(job, …)
        case ast.Call(func=function):
            called = isinstance(function, ast.Name) and function.id in functions
            return called or _names_job(function, constructors)
    return False
