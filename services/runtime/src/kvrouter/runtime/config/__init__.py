"""Options of services: where they come from, their types, and the list of static workers."""
