"""Sessions with Schedulers: which Scheduler to use, and which messages it receives."""
