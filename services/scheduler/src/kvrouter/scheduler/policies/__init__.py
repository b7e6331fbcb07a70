"""Routing policies, one folder each. ``catalogue`` finds every folder that has a ``policy.py``."""
