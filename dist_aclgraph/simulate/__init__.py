"""What a load would do to a deployment: its real decisions, replayed without devices or Ray."""
