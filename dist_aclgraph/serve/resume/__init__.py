"""Connections that outlive the process which answers on them (ADR 27)."""
