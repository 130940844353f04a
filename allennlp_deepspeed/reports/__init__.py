"""
Reports a training: console, `metrics.jsonl`, log writers and profiler.
"""
