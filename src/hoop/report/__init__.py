"""Output: metrics, TensorBoard, traces, charts, tables and pages. Where the figures come from is unknown here.

May import: plan.
"""

PUBLIC = (
    "chart",
    "metrics",
    "page",
    "run_events",
    "run_report",
    "spans",
    "strict_json",
    "tables",
    "tensorboard",
    "timeline",
    "trace",
    "training",
)
"""Modules that other rooms may import."""
