"""Metrics with several workers."""
