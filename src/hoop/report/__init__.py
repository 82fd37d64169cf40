"""Reports of a run: metrics, traces, charts, tables and pages, without a plotting library."""
