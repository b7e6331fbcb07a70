"""Admits requests while there is room for their work, and shares the room among tenants."""
