"""Sessions with Schedulers: which one, and what it is told."""
