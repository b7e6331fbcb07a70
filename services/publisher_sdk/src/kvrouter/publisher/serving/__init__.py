"""Requests of an engine, and their output."""
