"""Connections that outlive the process that answers requests on them (ADR 27)."""
