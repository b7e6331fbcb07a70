"""The ``kvrouter`` command: starts, drives, measures and composes the services."""
