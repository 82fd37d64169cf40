"""The option ``--metrics [HOST:]PORT``: its value, and the checks before a server starts. Loads no extra library."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace

from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.topology import Address
from hoop.wire.auth import Credentials

log = logging.getLogger("hoop.servers")
LOOPBACK = "127.0.0.1"


def parse_metrics(text: str, field: str = "--metrics") -> Address:
    """``9400`` is a port on loopback, ``HOST:9400`` an address; InvalidArgument for anything else."""
    if text.isascii() and text.isdigit() and len(text) <= 5:
        text = f"{LOOPBACK}:{text}"
    try:
        return Address.parse(text, field)
    except InvalidArgument:
        raise InvalidArgument(
            f"{field}: {text[:80]!r} is neither a port, such as 9400, nor host:port, such as 0.0.0.0:9400"
        ) from None


def device_metrics_address(coordinator: Address, device_id: int) -> Address:
    """Where a device of ``hoop up`` serves its metrics: at the coordinator's port plus its id; 0 stays 0."""
    port = coordinator.port + device_id if coordinator.port else 0
    if port > 65535:
        raise InvalidArgument(f"--metrics: device {device_id} would listen on port {port}; choose a lower port")
    return replace(coordinator, port=port)


def check_metrics(address: Address, credentials: Credentials, insecure: bool) -> None:
    """Raises if the library is missing, or if other hosts could read the metrics without a token.

    ``insecure`` allows the latter, with a warning; a cluster that has a token asks for it all the same.
    """
    if importlib.util.find_spec("prometheus_client") is None:
        raise FailedPrecondition("--metrics: prometheus-client is not installed; pip install 'hoop[dashboard]'")
    if address.is_loopback or credentials.token is not None:
        return
    where = f"{address.host} can be reached from other machines"
    if not insecure:
        raise InvalidArgument(
            f"--metrics: {where}, and there is no token for scrapers to send; give one (hoop token FILE, then "
            "--token-file FILE), use 127.0.0.1 behind a proxy of yours (with certificates too), or add --insecure on a "
            "network you trust"
        )
    log.warning("insecure: %s, and everyone there can read the metrics", where)
