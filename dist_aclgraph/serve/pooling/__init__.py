"""Embeddings of texts, and the relevance of documents for a query."""
