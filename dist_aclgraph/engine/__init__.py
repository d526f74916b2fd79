"""The work of a worker in a step: inputs, graphs, sampling, drafts and results."""
