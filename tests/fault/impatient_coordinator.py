"""``hoop`` with a coordinator that takes all devices for dead after ``$ISOLATION_S`` seconds without any heartbeat."""

from __future__ import annotations

import functools
import os

from hoop.cli.main import main
from hoop.membership import heartbeats

heartbeats.DetectorConfig = functools.partial(  # type: ignore[assignment, misc]
    heartbeats.DetectorConfig, isolation_s=float(os.environ["ISOLATION_S"])
)
main()
