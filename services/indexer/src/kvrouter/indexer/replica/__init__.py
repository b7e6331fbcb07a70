"""One replica: an index for every component of the namespace, and its metrics."""
