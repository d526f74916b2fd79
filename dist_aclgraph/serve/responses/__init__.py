"""The Responses API of OpenAI, translated to conversations of ``serve/openai``."""
