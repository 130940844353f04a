"""
Declares and resolves the trainer's `torch_compile`.
"""

from typing import Any, Dict, Literal, Optional, Union

from pydantic import BaseModel, ConfigDict, PositiveInt

KEY = "trainer.torch_compile"

# PyTorch's default.
DEFAULT_BACKEND = "inductor"


class TorchCompile(BaseModel):
    """Arguments of `torch.compile` that a config file can set."""

    model_config = ConfigDict(extra="forbid", strict=True)

    backend: str = DEFAULT_BACKEND
    mode: Optional[
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
    ] = None
    dynamic: Optional[bool] = None
    fullgraph: bool = False
    options: Optional[Dict[str, Union[str, int, float, bool]]] = None
    recompile_limit: Optional[PositiveInt] = None


def torch_compile_settings(value: Union[bool, Dict[str, Any], None]) -> Optional[Dict[str, Any]]:
    """
    Resolves the trainer's `torch_compile`.

    # Parameters

    value : `Union[bool, Dict[str, Any], None]`
        The trainer's `torch_compile`.

    # Returns

    `Optional[Dict[str, Any]]`
        The arguments of `torch.compile`, with a `backend`. `None` if nothing is compiled.
    """
    if value is None or value is False:
        return None
    settings = TorchCompile.model_validate({} if value is True else value)
    return {"backend": settings.backend, **settings.model_dump(exclude_defaults=True)}
