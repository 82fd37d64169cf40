"""Output: metrics, TensorBoard, traces, charts, tables and pages.

This package does not depend on the source of the figures.

May import: plan.
"""

PUBLIC = (
    "chart",
    "metrics",
    "page",
    "page_files",
    "run_events",
    "run_report",
    "spans",
    "strict_json",
    "tables",
    "tensorboard",
    "trace",
)
"""Modules that other rooms may import."""
