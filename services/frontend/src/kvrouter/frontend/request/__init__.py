"""A request, from its check and admission to its end."""
