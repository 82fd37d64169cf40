"""What a run leaves to be read: metrics, traces, pictures, tables and pages, without any plotting library."""
