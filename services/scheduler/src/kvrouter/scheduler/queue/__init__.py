"""Dispatches requests, at once or when a rank has room."""
