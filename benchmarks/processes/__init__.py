"""Programs and processes that single benches start and measure."""
