"""The processes of a deployment, which are Ray actors. Ray is never on the path of a step."""
