"""Workloads: generated, or read from files."""
