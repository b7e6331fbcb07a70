"""Requests that run on an engine, and their output."""
