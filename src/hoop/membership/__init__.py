"""Who is in: a pure state machine, the detector's rules, and the journal that outlives a coordinator."""
