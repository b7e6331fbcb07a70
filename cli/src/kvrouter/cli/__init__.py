"""The ``kvrouter`` command: runs, drives, measures and inspects the services."""
