"""Access to a Frontend: API keys, tokens, roles, the limits of keys and tenants, and admission."""
