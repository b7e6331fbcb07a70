"""``kvrouter top``: shows a running system in a terminal."""
