"""
The description of the processor, which DeepSpeed's operators for the CPU ask for.
"""

import functools

import cpuinfo


def describe_once() -> None:
    """
    Keeps it for this process and those that are forked from it. It takes a second, and each worker
    that steps on the CPU would ask for it three times.
    """
    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()
