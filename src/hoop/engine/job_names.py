"""The names that a job may be given by on the command line, checked without PyTorch, which takes seconds to load."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path

from hoop.engine.job_source import declared_jobs
from hoop.errors import NotFound

RECIPE_NAMES = ("softmax", "mnist", "lenet", "mobilenet-cifar10", "gpt-tiny")
"""The jobs of ``engine/recipes.py``, in its order."""


def check_job_name(name: str, recipes: Collection[str] = RECIPE_NAMES) -> None:
    """Raises if no job can have this name: neither a recipe, nor ``file.py:name`` of a file that is there."""
    where, colon, _ = name.rpartition(":")
    if colon:
        if where.endswith(".py") and not Path(where).is_file():
            raise NotFound(f"job: {where} is not a file on this machine ({Path(where).resolve()})")
        return
    if name in recipes:
        return
    if name.endswith(".py"):
        raise NotFound(f"job: {name!r} names no job in the file; write {_suggestion(Path(name))}")
    meant = difflib.get_close_matches(name, recipes, n=1)
    raise NotFound(
        f"job: {name!r} is no recipe; {f'do you mean {meant[0]}? There' if meant else 'there'} are "
        f"{', '.join(recipes)}; your own is file.py:name or module:name"
    )


def _suggestion(path: Path) -> str:
    """What to write for a file of jobs."""
    try:
        declared = sorted(declared_jobs(path.read_bytes()))
    except OSError:
        return f"{path}:NAME, and there is no file {path.resolve()}"
    except (SyntaxError, ValueError):
        declared = []
    if declared:
        return " or ".join(f"{path}:{name}" for name in declared)
    return f"{path}:NAME, with NAME = hoop.Job(…) in it"
