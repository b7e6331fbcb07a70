"""Routing policies, one folder each. ``catalogue`` finds every folder with a ``policy.py``."""
