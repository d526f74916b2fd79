"""Simulates a deployment under a load: the deployment's real decisions, without devices or Ray."""
