"""Proposes several draft tokens for each request, counts the accepted drafts, and copies drafts to
the host.
"""
