from typing import Annotated, Dict, List, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

AUTO = "auto"


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
