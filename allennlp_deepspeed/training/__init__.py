"""Trainer: forward, backward and optimizer step, and the agreement of the ranks between steps."""
