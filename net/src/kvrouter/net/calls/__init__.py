"""Calls between two processes over long-lived streams."""
