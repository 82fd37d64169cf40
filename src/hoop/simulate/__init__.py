"""The engine's own plans and rules in virtual time: what a step takes on devices and links that are not here."""
