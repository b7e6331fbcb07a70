"""The lifecycle of one request, from its booking to its end."""
