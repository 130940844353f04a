"""
Saves, resumes and exports checkpoints.
"""
