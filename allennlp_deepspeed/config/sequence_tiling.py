from typing import Annotated, List

from pydantic import ConfigDict, Field, PositiveInt

# Of the standard library's, pydantic understands those from Python 3.12 on.
from typing_extensions import TypedDict


class SequenceTiling(TypedDict):
    """
    The trainer's `sequence_tiling`.

    # Parameters

    modules : `List[str]`
        Regular expressions for names of modules.
    num_tiles : `int`
        Into which sequences are divided.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    modules: Annotated[List[str], Field(min_length=1)]
    num_tiles: PositiveInt
