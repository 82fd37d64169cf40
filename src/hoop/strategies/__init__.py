"""Parallelism strategies: each makes a plan for a number of devices and micro-batches, and runs nothing."""
