"""Traces: the shipped one, other Mooncake traces, and recordings."""
