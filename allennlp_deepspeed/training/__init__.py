"""
The trainer: forward, backward and step, and what the ranks agree on between steps.
"""
