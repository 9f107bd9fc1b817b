"""Pure functions of (params, pool, batch)."""
