"""Options of services: sources, types, and the list of static workers."""
