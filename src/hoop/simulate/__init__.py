"""Simulates the engine's plans and rules in virtual time, on modelled devices and links."""
