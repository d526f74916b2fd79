"""Communication between processes: addresses, keys, messages, step channels, client links."""
