"""Live bookings: their table, their leases and sessions, their progress and end."""
