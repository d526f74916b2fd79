"""Messages between processes: sockets and keys, messages, steps, and links that notice silence."""
