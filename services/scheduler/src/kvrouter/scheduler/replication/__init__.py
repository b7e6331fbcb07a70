"""Bookings of the other Schedulers of a component, over NATS."""
