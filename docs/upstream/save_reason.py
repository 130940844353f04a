"""`torch.save` to a full disk doesn't say that the disk is full."""

import sys

import torch


def error_of(target):
    try:
        torch.save(torch.ones(1_000_000), target)
    except Exception as error:
        return error
    raise AssertionError("/dev/full is never written")


by_path = error_of("/dev/full")
with open("/dev/full", "wb", buffering=0) as file:
    by_file = error_of(file)
others = [str(error) for error in (by_path, by_file) if not isinstance(error, OSError)]
if others:
    sys.exit(f"fault: a full disk is reported as {others}")
