"""The OpenAI API: requests and replies, and the objects that all its routes share."""
