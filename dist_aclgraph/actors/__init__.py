"""Ray actors: who starts, watches and stops whom. Ray is never on the path of a step."""
