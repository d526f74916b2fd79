"""Communication between processes: sockets, keys, messages, steps, links that notice silence."""
