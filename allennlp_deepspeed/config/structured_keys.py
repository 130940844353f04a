"""
Declares the values of the trainer's keys that are objects: `grad_cache`, `sequence_tiling` and
`torch_compile`.
"""

from typing import Annotated, Any, Dict, List, Literal, Optional, Union

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

# pydantic supports the standard library's `TypedDict` only from Python 3.12 on.
from typing_extensions import TypedDict

AUTO = "auto"

TORCH_COMPILE = "trainer.torch_compile"

# PyTorch's default.
DEFAULT_BACKEND = "inductor"


class GradCacheSettings(BaseModel):
    """
    Value of the trainer's `grad_cache`.

    # Parameters

    chunk_size : `Union[int, Literal["auto"], Dict[str, int]]`
        The number of examples per chunk, on each rank: a number; a number for each argument of the
        model's `encode`, which is then called with one argument at a time, as in `{"query": 64,
        "document": 16}`; or `"auto"`, the largest number that fits.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    chunk_size: Union[
        PositiveInt, Literal["auto"], Annotated[Dict[str, PositiveInt], Field(min_length=1)]
    ]

    @property
    def names(self) -> List[str]:
        """The arguments of `encode`, if each has a chunk size of its own."""
        return list(self.chunk_size) if isinstance(self.chunk_size, dict) else []


class SequenceTiling(TypedDict):
    """
    Value of the trainer's `sequence_tiling`.

    # Parameters

    modules : `List[str]`
        Regular expressions for names of modules.
    num_tiles : `int`
        The number of tiles that a sequence is divided into.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    modules: Annotated[List[str], Field(min_length=1)]
    num_tiles: PositiveInt


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
