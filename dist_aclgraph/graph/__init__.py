"""Graph plans: which sizes are captured, what they cost, and which graph a batch replays."""
