"""The core against the strongest peer: the same operations, in turn, in one run."""
