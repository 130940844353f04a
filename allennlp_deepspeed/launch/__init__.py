"""
What happens before a worker trains: check of the config, agent and workers, recovery.
"""
