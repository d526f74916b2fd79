"""Graph plans: budgets, buckets, negotiation and dispatch. No module here uses a device."""
