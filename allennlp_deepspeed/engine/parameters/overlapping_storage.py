"""
Refuses distinct parameters that share memory. The engine moves trainable parameters to its own flat
tensors, so that only one of them would be trained.
"""

import torch
from allennlp.common.checks import ConfigurationError

STAGE_0 = '"deepspeed_config": {"zero_optimization": {"stage": 0}} without "bf16" and "fp16"'


def check_memory(model: torch.nn.Module, where: str) -> None:
    """
    Checks that no trainable parameter shares memory with another tensor.

    # Parameters

    model : `torch.nn.Module`, required.
    where : `str`, required.
        The ZeRO stage or the precision, for the message.

    # Raises

    `ConfigurationError`
        If a trainable parameter and another parameter, or a buffer, share an element.
    """
    tensors = [
        (name, tensor)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.layout == torch.strided and tensor.numel() > 0 and not tensor.is_meta
    ]
    tensors.sort(key=lambda named: (str(named[1].device), named[1].data_ptr()))
    for i, (name, tensor) in enumerate(tensors):
        for other_name, other in tensors[i + 1 :]:
            if other.device != tensor.device or other.data_ptr() >= end_address(tensor):
                break
            is_trained = tensor.requires_grad or other.requires_grad
            if is_trained and share_elements(tensor, other):
                raise overlapping_storage_error(name, other_name, where)


def overlapping_storage_error(name: str, other_name: str, where: str) -> ConfigurationError:
    return ConfigurationError(
        f"'{name}' and '{other_name}' are two tensors that share memory, but {where} the engine "
        "would update them separately. Tie them as one parameter, as in `decoder.weight = "
        f"encoder.weight` (without `.data` and `nn.Parameter`), or write {STAGE_0}."
    )


def end_address(tensor: torch.Tensor) -> int:
    """Returns the address after a tensor's last element."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def share_elements(first: torch.Tensor, second: torch.Tensor) -> bool:
    """
    Returns whether two tensors share any element, which two slices of columns of one matrix don't.
    """
    if second.data_ptr() < first.data_ptr():
        first, second = second, first
    if second.data_ptr() >= end_address(first):
        return False
    offset, remainder = divmod(second.data_ptr() - first.data_ptr(), first.element_size())
    if first.is_contiguous() or first.dtype != second.dtype or remainder:
        return True
    length = max(end_address(first), end_address(second)) - first.data_ptr()
    addresses = torch.arange(length // first.element_size())
    of_first = addresses.as_strided(first.shape, first.stride()).reshape(-1)
    of_second = addresses.as_strided(second.shape, second.stride(), offset).reshape(-1)
    return bool(torch.isin(of_first, of_second).any())
