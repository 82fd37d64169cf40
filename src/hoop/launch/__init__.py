"""Ways to start a cluster: one file a launcher."""
