"""Context parallelism: which ranks store the KV of a token, and which ranks run the token."""
