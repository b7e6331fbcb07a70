"""Runs the work that clients cause, such as parsing and tokenizing, in threads; tenants take turns."""
