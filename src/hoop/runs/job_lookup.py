"""Jobs by name, as a command finds them: recipes, a file of the user's, a module that can be imported here."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hoop.engine.job import Job, find_job
from hoop.engine.recipes import RECIPES
from hoop.runs.api import preload
from hoop.runs.user_code import blaming_user_code


def resolved(name: str) -> str:
    """A job's name that means the same in any directory: a file's path is made absolute."""
    where, colon, attribute = name.rpartition(":")
    return f"{Path(where).resolve()}:{attribute}" if colon and where.endswith(".py") else name


def job_named(name: str, load: bool = True) -> Job:
    """The job; what is wrong in the user's code is told as theirs.

    With ``load`` its data is read now, and meanwhile what devices will need.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")  # as python -m does: a module beside which one stands can be named
    with blaming_user_code(f"loading {name}"):
        job = find_job(name, RECIPES)
        if load:
            with ThreadPoolExecutor(1) as pool:  # ended before anything is forked
                pool.submit(preload)
                job.data()
    return job
