"""A training run: ``hoop.train``, following a job, recording it, checkpoints, ledger and audit, prediction, export.

May import: memory native wire membership client schedulers servers data plan strategies engine simulate report launch.
"""

PUBLIC = (
    "api",
    "audit",
    "calibration",
    "calibration_run",
    "callbacks",
    "checkpoint_store",
    "clean_process",
    "device_count",
    "doctor",
    "export",
    "job_follower",
    "job_lookup",
    "meeting",
    "prediction",
    "result",
    "run_recorder",
    "simulation_report",
    "training",
)
"""Modules that other rooms may import."""
