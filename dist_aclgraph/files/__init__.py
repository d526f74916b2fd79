"""Files and folders that this package reads or creates, other than its code."""
