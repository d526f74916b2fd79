"""What a worker does in a step: inputs, graphs, sampling, drafts and results."""
