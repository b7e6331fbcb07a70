"""The Scheduler: which rank a request goes to, and the load that requests in flight put on each rank."""
