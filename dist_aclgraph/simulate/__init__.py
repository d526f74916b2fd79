"""The effect of a load on a deployment: its real decisions, replayed without devices or Ray."""
