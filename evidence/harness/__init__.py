"""
What all studies share: process trees, the stopwatch, memory, pairing, trainings, reports and plots.
"""
