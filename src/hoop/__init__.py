"""Hoop: train a PyTorch model across whatever devices you have; no failure changes what comes out.

result = hoop.train(model, (images, labels), devices=4, strategy=hoop.DataParallel(), epochs=3)

with hoop.connect("127.0.0.1:4021") as cluster:
    comm = cluster.communicator(3)
    sums = comm.all_reduce([a, b, c])
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from hoop.errors import HoopError, PeerError, UserError

if TYPE_CHECKING:
    from hoop.client.cluster import Cluster, connect
    from hoop.client.communicator import Communicator
    from hoop.client.device import Buffer, Device
    from hoop.client.handle import Handle
    from hoop.data.dataset import Splits
    from hoop.data.tensors import TensorData
    from hoop.engine.job import Job
    from hoop.launch.ray_cluster import Ray
    from hoop.runs.api import train
    from hoop.runs.callbacks import Callback, MlflowLogger, OpenTelemetryLogger, TensorBoardLogger, WandbLogger
    from hoop.runs.result import Result
    from hoop.strategies.data_parallel import DataParallel
    from hoop.strategies.hybrid import Hybrid
    from hoop.strategies.parameter_server import ParameterServer
    from hoop.strategies.pipeline import Pipeline
    from hoop.strategies.ring import RingModel

__version__ = "0.2.0"
__all__ = [
    "Buffer",
    "Callback",
    "Cluster",
    "Communicator",
    "DataParallel",
    "Device",
    "Handle",
    "HoopError",
    "Hybrid",
    "Job",
    "MlflowLogger",
    "OpenTelemetryLogger",
    "ParameterServer",
    "PeerError",
    "Pipeline",
    "Ray",
    "Result",
    "RingModel",
    "Splits",
    "TensorBoardLogger",
    "TensorData",
    "UserError",
    "WandbLogger",
    "connect",
    "train",
]

# Loaded when first used: most rooms must do without gRPC and PyTorch, and importing hoop must cost next to nothing.
_ROOMS = {
    "Buffer": "hoop.client.device",
    "Callback": "hoop.runs.callbacks",
    "Cluster": "hoop.client.cluster",
    "Communicator": "hoop.client.communicator",
    "DataParallel": "hoop.strategies.data_parallel",
    "Device": "hoop.client.device",
    "Handle": "hoop.client.handle",
    "Hybrid": "hoop.strategies.hybrid",
    "Job": "hoop.engine.job",
    "MlflowLogger": "hoop.runs.callbacks",
    "OpenTelemetryLogger": "hoop.runs.callbacks",
    "ParameterServer": "hoop.strategies.parameter_server",
    "Pipeline": "hoop.strategies.pipeline",
    "Ray": "hoop.launch.ray_cluster",
    "Result": "hoop.runs.result",
    "RingModel": "hoop.strategies.ring",
    "Splits": "hoop.data.dataset",
    "TensorBoardLogger": "hoop.runs.callbacks",
    "TensorData": "hoop.data.tensors",
    "WandbLogger": "hoop.runs.callbacks",
    "connect": "hoop.client.cluster",
    "train": "hoop.runs.api",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'hoop' has no attribute {name!r}")
    return getattr(importlib.import_module(_ROOMS[name]), name)


def __dir__() -> list[str]:
    """The public names, for completion: most are loaded when first used, and none of this file's imports is one."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


if os.environ.get("HOOP_LOG"):  # logging is imported only where it was asked for
    from hoop.logs import configure

    configure(os.environ["HOOP_LOG"])
    del configure
