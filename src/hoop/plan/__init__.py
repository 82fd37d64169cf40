"""What every device does in a step, as data: instructions, checks, and the cut of a model into stages."""
