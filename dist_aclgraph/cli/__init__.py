"""The command line: run, serve, plan, bench, doctor."""
