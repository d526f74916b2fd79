"""HTTP over TCP: the server, its connections, and the requests on a connection."""
