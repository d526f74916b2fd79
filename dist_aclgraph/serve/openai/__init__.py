"""The OpenAI API: requests and replies, and what all its routes share."""
