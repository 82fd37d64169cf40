"""Training steps as data: instructions, plans, their validation, and the partition of a model into stages."""
