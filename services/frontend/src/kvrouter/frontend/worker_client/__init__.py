"""Calls to workers: channels, health, and what a worker's failure means for its request."""
