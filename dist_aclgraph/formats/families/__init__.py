"""The formats in which families of models write calls of tools: one file for each format."""
