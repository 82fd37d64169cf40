"""Long runs under random faults, from a seed, and whether they changed anything."""
