"""``kvrouter engine …``: engines of a process come and go."""
