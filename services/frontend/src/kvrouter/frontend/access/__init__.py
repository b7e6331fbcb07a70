"""Who may do what at a Frontend: API keys, tokens, roles, and the limits of keys and tenants."""
