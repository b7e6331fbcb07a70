"""Requests that wait at the Scheduler for a rank with room."""
