"""Drafts of several tokens: proposes them, counts the accepted ones, copies them to the host."""
