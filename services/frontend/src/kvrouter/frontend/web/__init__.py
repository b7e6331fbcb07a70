"""The web page of a Frontend: a live, read-only view of the whole system."""
