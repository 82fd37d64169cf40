"""A stage of the model on a device: its state in the arena, what computes it, how gradients become an update."""
