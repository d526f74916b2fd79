"""Captures graphs on all ranks together; each capture succeeds on all ranks or on no rank."""
