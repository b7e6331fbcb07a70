"""Runs a workload against simulated engines in virtual time, routed by the Scheduler's own code."""
