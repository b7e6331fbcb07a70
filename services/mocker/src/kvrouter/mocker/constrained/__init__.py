"""Output that keeps a constraint: an instance of a JSON schema, a text that matches a pattern, one of several texts."""
