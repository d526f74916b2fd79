"""How model families write reasoning and calls of tools: one file for each family."""
