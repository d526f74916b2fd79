"""Proposes drafts of several tokens, counts the accepted drafts, copies drafts to the host."""
