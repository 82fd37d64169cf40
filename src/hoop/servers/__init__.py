"""The coordinator and the device server: they move bytes, call ``membership``, and carry out its instructions.
What a device trains is given to it as a function (``engine.entrypoint.train_rank``).

May import: memory wire transport collectives membership strategies.
"""

PUBLIC = (
    "advertised_address",
    "coordinator",
    "coordinator_service",
    "device",
    "grpc_server",
    "lab_dialect",
    "metrics_options",
    "tasks",
)
"""Modules that other rooms may import."""
