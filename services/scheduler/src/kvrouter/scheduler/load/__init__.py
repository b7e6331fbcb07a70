"""The load of ranks: booked, reported, and whether it makes a rank busy."""
