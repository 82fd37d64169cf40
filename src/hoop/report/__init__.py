"""Output: the view of a run, its summary, metrics, TensorBoard, traces, charts, tables and pages.

This package does not depend on the source of the figures.

May import: plan.
"""

PUBLIC = (
    "chart",
    "metrics",
    "page",
    "page_files",
    "progress_view",
    "run_events",
    "run_report",
    "run_summary",
    "spans",
    "strict_json",
    "tables",
    "tensorboard",
    "trace",
)
"""Modules that other rooms may import."""
