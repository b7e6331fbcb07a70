"""Runs a workload against simulated engines in virtual time, with the router's own code between them."""
