"""A training step as data: instructions, plans, their validation, partitioning of a model, placed faults.
Neither torch nor sockets are used here.

May import: nothing but the modules directly in hoop.
"""

PUBLIC = ("builder", "faults", "instructions", "partition", "plan", "rules", "unit_clock", "validation")
"""Modules that other rooms may import."""
