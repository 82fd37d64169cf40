"""Ranks that follow a rule as messages come, instead of a list: parameter servers, their workers, and the ring."""
