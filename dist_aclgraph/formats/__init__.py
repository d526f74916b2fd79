"""How models write reasoning and calls of tools, and the grammars of such answers."""
