"""Routing policies. ``catalogue`` lists them."""
