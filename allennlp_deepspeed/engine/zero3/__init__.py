"""Hooks of ZeRO stage 3: construction, gathering and release of partitioned parameters."""
