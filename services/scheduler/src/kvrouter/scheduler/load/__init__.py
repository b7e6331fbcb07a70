"""The load of ranks: booked, reported, and when it makes them busy."""
