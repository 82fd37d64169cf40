"""Trains a model on devices: executes plans, with everything that lasts in the devices' arenas."""
