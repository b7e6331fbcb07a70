"""``kvrouter top``: a running system in a terminal."""
