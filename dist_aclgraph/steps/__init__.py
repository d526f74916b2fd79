"""The description of a step: messages between engine and workers, inputs on the host, padding."""
