"""Finds a job by its name: a recipe, ``file.py:name``, or ``package.module:name``."""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hoop import environment
from hoop.engine.job import Job, find_job
from hoop.engine.recipes import RECIPES
from hoop.engine.user_code import attribute_exceptions


def with_absolute_path(name: str) -> str:
    """The name with an absolute path, if it names a file."""
    where, colon, attribute = name.rpartition(":")
    return f"{Path(where).resolve()}:{attribute}" if colon and where.endswith(".py") else name


def load_job(name: str, load: bool = True) -> Job:
    """Loads a job; an exception of the user's code becomes a UserError with its traceback.

    With ``load`` it reads the data, and imports meanwhile what devices need.
    """
    if ":" in name and "" not in sys.path:
        sys.path.append("")  # modules of the current folder can be imported; last, so that none replaces another
    with attribute_exceptions(f"loading {name}"):
        job = find_job(name, RECIPES)
        if load:
            with ThreadPoolExecutor(1) as pool:  # it ends before devices are forked
                pool.submit(preload, job.has_own_parts)
                job.data()
    return job


def preload(optimizer: bool = False) -> None:
    """Loads what devices and the head process need, once, before they are forked.

    ``optimizer``: devices make a ``torch.optim.Optimizer``, which imports ``torch._dynamo``: two seconds in each.
    """
    for module in (
        "hoop.client.cluster",
        "hoop.engine.trainer",
        "hoop.runs.job_follower",
        "hoop.launch.forked",
        "numpy.ma",  # NumPy imports it for the first median
        "numpy.random",
        *(["torch._dynamo"] if optimizer else []),
    ):
        importlib.import_module(module)
    environment.versions()
