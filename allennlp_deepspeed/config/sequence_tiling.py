from typing import Annotated, List

from pydantic import ConfigDict, Field, PositiveInt

# pydantic supports the standard library's `TypedDict` only from Python 3.12 on.
from typing_extensions import TypedDict


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
