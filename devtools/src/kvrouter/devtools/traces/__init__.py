"""Traces: the one that is shipped, Mooncake's, and recordings of one's own traffic."""
