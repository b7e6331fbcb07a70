"""The Scheduler's own code in virtual time: one Scheduler, or several replicas."""
