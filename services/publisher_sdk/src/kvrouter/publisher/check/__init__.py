"""Conformance kit: checks that a worker does what the contract says, and explains what it does not."""
