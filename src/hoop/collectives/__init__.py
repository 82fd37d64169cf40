"""Collective operations: every collective as a plan, and the communicator that executes plans."""
