"""A whole deployment: starting it, finding it, and replacing its controller if it dies."""
