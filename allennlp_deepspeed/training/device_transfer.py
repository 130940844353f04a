from typing import Any

import torch


def to_device(value: Any, device: torch.device) -> Any:
    """
    Moves all tensors of a structure to the device, as AllenNLP's `move_to_device` does, but without
    waiting for a GPU: the next batches are prepared and on their way while it still computes with
    the last.

    # Parameters

    value : `Any`, required.
        Tensors in dictionaries and lists, which are changed, and tuples. What else there is stays
        as it is.
    device : `torch.device`, required.
    """
    if isinstance(value, torch.Tensor):
        if value.device == device:
            return value
        if device.type == "cuda" and value.device.type == "cpu":
            # Only from pinned memory can it be copied beside what the host does next. PyTorch
            # keeps that memory until the copy is done.
            value = value.pin_memory()
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = to_device(item, device)
        return value
    if isinstance(value, list):
        value[:] = [to_device(item, device) for item in value]
        return value
    if isinstance(value, tuple):
        items = [to_device(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
