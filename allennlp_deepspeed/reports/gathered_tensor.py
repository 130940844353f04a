from typing import Any, Callable, Optional, Tuple

import torch
from torch.utils._pytree import tree_map_only

# What is known of a tensor without its elements.
_OF_NO_ELEMENTS = {
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.size,
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_sparse.__get__,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
}


class GatheredTensor(torch.Tensor):
    """
    Behaves like a tensor of which this rank has only a shard: each operation on it gathers the
    whole for itself and lets go of it. What PyTorch gives the same elements, `data`, `detach()` and
    `cpu()`, is the same object, so that nothing is gathered before there is something to compute.

    # Parameters

    gather : `Callable[[], torch.Tensor]`, required.
        Returns the whole.
    shape : `Tuple[int, ...]`, required.
        Of the whole.
    requires_grad : `bool`, optional (default = `False`)
    """

    _gather: Callable[[], torch.Tensor]

    def __new__(
        cls, gather: Callable[[], torch.Tensor], shape: Tuple[int, ...], requires_grad: bool = False
    ) -> "GatheredTensor":
        tensor = torch.empty(shape, dtype=torch.float32, device="meta")
        gathered = torch.Tensor._make_subclass(cls, tensor, requires_grad)
        gathered._gather = gather
        return gathered

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Tuple = (), kwargs: Optional[dict] = None
    ) -> Any:
        if func in _OF_NO_ELEMENTS:
            return super().__torch_function__(func, types, args, kwargs)
        args, kwargs = tree_map_only(
            GatheredTensor, lambda tensor: tensor._gather(), (args, kwargs or {})
        )
        return func(*args, **kwargs)

    @property
    def data(self) -> "GatheredTensor":  # type: ignore[override]
        return self

    def detach(self) -> "GatheredTensor":  # type: ignore[override]
        return self

    def cpu(self, *args: Any, **kwargs: Any) -> "GatheredTensor":
        return self

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self._gather().cpu().numpy(*args, **kwargs)


class GatheredUpdate(GatheredTensor):
    """
    By how much the optimizer's step has changed a parameter: what it was before less what it is.
    AllenNLP computes this from a copy of the parameter, in place. Here it has been recorded.
    """

    def sub_(self, *args: Any, **kwargs: Any) -> "GatheredUpdate":  # type: ignore[override]
        return self


class GatheredParameter(GatheredTensor):
    """
    A parameter of a sharded model.

    # Parameters

    gather, shape, requires_grad
        As of a `GatheredTensor`.
    gradient : `Callable[[], Optional[torch.Tensor]]`, required.
        Returns what is its `grad`.
    update : `GatheredUpdate`, required.
    """

    _gradient: Callable[[], Optional[torch.Tensor]]
    _update: GatheredUpdate

    def __new__(  # type: ignore[misc]
        cls,
        gather: Callable[[], torch.Tensor],
        shape: Tuple[int, ...],
        requires_grad: bool,
        gradient: Callable[[], Optional[torch.Tensor]],
        update: GatheredUpdate,
    ) -> "GatheredParameter":
        parameter = super().__new__(cls, gather, shape, requires_grad)
        assert isinstance(parameter, GatheredParameter)
        parameter._gradient = gradient
        parameter._update = update
        return parameter

    @property
    def grad(self) -> Optional[torch.Tensor]:  # type: ignore[override]
        return self._gradient()

    def clone(self, *args: Any, **kwargs: Any) -> GatheredUpdate:  # type: ignore[override]
        """AllenNLP's copy from before a step, from which it subtracts the parameter after it."""
        return self._update
