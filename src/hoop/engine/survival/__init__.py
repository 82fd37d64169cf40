"""What makes a run outlive a device: copies of the state, recovery, checkpoints, and who is slow, not dead."""
