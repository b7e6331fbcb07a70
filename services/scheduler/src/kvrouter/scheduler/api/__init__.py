"""The Scheduler's contract: selections, sessions, status."""
