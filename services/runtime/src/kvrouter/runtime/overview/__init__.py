"""The state of a whole system, as its services report it: for ``kvrouter top`` and the Frontend's web page."""
