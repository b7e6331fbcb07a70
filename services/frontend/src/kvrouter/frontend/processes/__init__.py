"""Several Frontend processes behind one port: a parent that starts and restarts them, and merges their metrics."""
