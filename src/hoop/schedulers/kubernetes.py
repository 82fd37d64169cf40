"""Kubernetes: a pod of an Indexed Job or of a StatefulSet, one process a pod.

Kubernetes tells a pod its index, and not how many there are: the manifest says so in HOOP_WORLD_SIZE. Without it an
Indexed Job is taken for independent runs. Rank 0 is found by the name that a headless service gives to its pod.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hoop.errors import InvalidArgument
from hoop.schedulers.base import Placement, number, text
from hoop.topology import Address

PORT = 4021
"""Port of the meeting point. A pod has an address of its own, so all jobs may use the same port."""
WORLD_SIZE, SERVICE = "HOOP_WORLD_SIZE", "HOOP_SERVICE"
_POD = re.compile(r"(?P<name>[a-z0-9]([a-z0-9.-]*[a-z0-9])?)-(?P<index>[0-9]+)")
"""Pattern of a pod's host name: the name of its Job or StatefulSet, and its index."""


@dataclass(frozen=True)
class Kubernetes:
    name: str = "kubernetes"

    def detect(self, environ: Mapping[str, str]) -> bool:
        return all(environ.get(name) for name in ("KUBERNETES_SERVICE_HOST", WORLD_SIZE))

    def placement(self, environ: Mapping[str, str]) -> Placement:
        hostname = text(environ, "HOSTNAME")
        pod = _POD.fullmatch(hostname)
        if pod is None:
            raise InvalidArgument(
                f"HOSTNAME: {hostname[:80]!r} does not end with the index of a pod; use an Indexed Job "
                "(completionMode: Indexed) or a StatefulSet"
            )
        service = environ.get(SERVICE) or pod["name"]
        index = number(environ, "JOB_COMPLETION_INDEX") if environ.get("JOB_COMPLETION_INDEX") else int(pod["index"])
        return Placement(
            self.name,
            rank=index,
            world_size=number(environ, WORLD_SIZE),
            local_rank=0,
            local_world_size=1,
            meeting_point=Address(f"{pod['name']}-0.{service}", PORT),
        )
