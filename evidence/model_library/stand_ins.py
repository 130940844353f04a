"""Stand-ins with random weights for the models that the library's configs download."""

import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Tuple

import numpy as np

# Of the ELMo that the training configs have, in each direction.
ELMO_DIM = 512


@contextmanager
def hub(with_large_models: bool = False) -> Iterator[None]:
    """The hub's models in a cache of their own. To be entered before its client is imported."""
    from evidence.upstream import allennlp_models as stand_ins

    stand_ins.write_stand_ins()
    if with_large_models:
        stand_ins.write_large_stand_ins()
    try:
        yield
    finally:
        shutil.rmtree(os.environ["HF_HUB_CACHE"], ignore_errors=True)


def write_elmo(fixtures: Path, folder: Path) -> Tuple[Path, Path]:
    """Writes the options and weights of an ELMo as wide as the training configs expect."""
    import h5py

    given = fixtures / "lm" / "elmo"
    options = json.loads((given / "options.json").read_text())
    options["lstm"]["projection_dim"] = ELMO_DIM
    (folder / "options.json").write_text(json.dumps(options))
    random = np.random.default_rng(0)
    weights = folder / "weights.hdf5"
    with h5py.File(given / "lm_weights.hdf5") as small, h5py.File(weights, "w") as large:

        def write(name: str, item: Any) -> None:
            if isinstance(item, h5py.Group):
                return
            shape = item.shape
            if name.startswith("CNN_proj/") or name.endswith("/W_P_0"):
                shape = (*shape[:-1], ELMO_DIM)
            elif name.endswith("/W_0"):
                shape = (2 * ELMO_DIM, shape[1])
            large[name] = random.normal(scale=0.1, size=shape).astype(np.float32)

        small.visititems(write)
    return folder / "options.json", weights
