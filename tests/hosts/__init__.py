"""
Trainings on several hosts (`tests/support/hosts.py`).
"""
