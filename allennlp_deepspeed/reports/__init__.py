"""
Console, `metrics.jsonl`, log writers and profiler.
"""
