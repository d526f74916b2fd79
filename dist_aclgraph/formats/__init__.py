"""Formats in which models write reasoning and tool calls, and grammars for these formats."""
