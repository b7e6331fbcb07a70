"""The Scheduler: chooses a rank for each request, and counts the load of requests in flight."""
