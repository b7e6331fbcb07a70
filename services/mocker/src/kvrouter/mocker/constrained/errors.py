"""The error of constraints."""


class Unsupported(ValueError):
    """A constraint is invalid, or has what the simulated engine does not know."""
