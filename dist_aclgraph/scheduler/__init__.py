"""Who runs next: requests, the step decision, and the messages that carry it."""
