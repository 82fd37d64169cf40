"""Strategies: each returns, for a number of devices and micro-batches, a plan, and runs nothing."""
