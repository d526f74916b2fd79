"""Ray actors and what they say to each other: engine, workers, controller, clients."""
