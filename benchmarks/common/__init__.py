"""Code that several benches share: deployments, requests, command lines, tables and figures."""
