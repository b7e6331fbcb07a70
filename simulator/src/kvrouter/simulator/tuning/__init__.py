"""Finds routing settings for a workload and a fleet in the simulator."""
