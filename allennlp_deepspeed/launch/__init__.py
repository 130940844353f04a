"""Everything before a worker trains: config check, agent and workers, recovery."""
