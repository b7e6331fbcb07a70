"""Conformance kit: checks a worker against the contract, and explains each difference."""
