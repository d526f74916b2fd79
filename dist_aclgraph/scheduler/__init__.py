"""The order of requests: the decision of a step, and the messages that carry it."""
