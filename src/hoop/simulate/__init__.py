"""The plans and rules of the engine in virtual time: clusters, cost models, failures, a search over strategies.
Neither torch nor the engine is used here.

May import: membership plan strategies collectives.
"""

PUBLIC = ("cluster", "cost_model", "failure_model", "instruction_cost", "rank", "result", "search", "simulation")
"""Modules that other rooms may import."""
