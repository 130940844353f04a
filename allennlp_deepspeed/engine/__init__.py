"""Wraps the model in DeepSpeed's engine. No other folder touches DeepSpeed's private attributes."""
