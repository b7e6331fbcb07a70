"""The Scheduler's own code in virtual time: one, or several replicas."""
