"""What describes a step: messages between engine and workers, inputs on the host, and padding."""
