from typing import Annotated, Dict, List, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

AUTO = "auto"


class GradCacheSettings(BaseModel):
    """
    The trainer's `grad_cache`.

    # Parameters

    chunk_size : `Union[int, Literal["auto"], Dict[str, int]]`
        Examples to encode at a time, on each rank. A number; a number for each argument of the
        model's `encode`, which is then called for one at a time, as in `{"query": 64, "document":
        16}`; or `"auto"`, the largest number that fits.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    chunk_size: Union[
        PositiveInt, Literal["auto"], Annotated[Dict[str, PositiveInt], Field(min_length=1)]
    ]

    @property
    def names(self) -> List[str]:
        """Arguments of `encode`, if they are chunked apart."""
        return list(self.chunk_size) if isinstance(self.chunk_size, dict) else []
