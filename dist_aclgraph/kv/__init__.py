"""The paged KV cache: byte formulas, blocks and their reuse."""
