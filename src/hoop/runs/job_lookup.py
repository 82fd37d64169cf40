"""Finds a job by its name: a recipe, ``file.py:name``, or ``package.module:name``."""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from hoop import environment
from hoop.engine.job import LOADED, Job, find_job, import_path
from hoop.engine.recipes import RECIPES
from hoop.engine.user_code import attribute_exceptions

if TYPE_CHECKING:
    from hoop.runs.by_value import Encoded


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


def load_for_devices(name: str, given: Encoded | None) -> None:
    """Loads a job for the devices that are forked from this process, or for the device that this process is.

    ``given``: the job that a program has made, which travels by value; None: it is found by its name.
    """
    if given is None:
        load_job(name)
        return
    from hoop.runs.by_value import decode

    with attribute_exceptions("loading the job of hoop.train on the devices"):
        LOADED[import_path(name)] = decode(given)


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
