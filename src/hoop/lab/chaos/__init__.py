"""Training under random faults, compared with an undisturbed run."""
