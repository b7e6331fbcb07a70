"""Benchmarks of the core beside Dynamo's: the same operations, alternating in one run."""
