"""
Saving, resuming and exporting: what a training has on disk.
"""
