"""What several benches use: deployments, requests, command lines, tables and figures."""
