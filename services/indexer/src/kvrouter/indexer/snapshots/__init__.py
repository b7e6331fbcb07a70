"""Snapshots of a component's index: taking, storing and restoring them."""
