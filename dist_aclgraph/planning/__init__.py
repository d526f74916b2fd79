"""Graph plans as values: budgets, buckets, negotiation, dispatch; nothing here touches a device."""
