"""Calls to workers: channels, probes, health, and the consequences of failures."""
