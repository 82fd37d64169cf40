"""Membership of a cluster: pure state machines, the failure detector, and the journal that survives a coordinator."""
