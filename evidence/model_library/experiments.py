"""The experiments of a checkout of allennlp-models, with stand-ins for what they would download."""

import copy
import functools
import json
import random
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple
from unittest import mock

import numpy as np
import spacy
import torch
import torch.distributed as dist
from allennlp.common import Params
from allennlp.common import util as common_util
from allennlp.data import DataLoader, DatasetReader, Vocabulary
from allennlp.data.data_loaders import MultiProcessDataLoader, MultiTaskDataLoader
from allennlp.data.data_loaders.data_loader import TensorDict
from allennlp.modules.encoder_base import _EncoderBase

# What has a trainer and isn't called an experiment, and what is called so and is to fail.
_OTHERS = (
    "lm/language_model/characters_token_embedder.json",
    "structured_prediction/constituency_parser/constituency_parser.json",
)
_BROKEN = "broken_experiments"
MAX_EPOCHS = 2
SGD_RATE = 0.1
# Changes of Adam: an `eps` above the rounding of gradients, and updates above that of weights.
LESS_ROUNDING = {"with a large eps": {"eps": 1e-3}, "with a large rate": {"eps": 1e-3, "lr": 1e-2}}

_PAIRS = [["woman", "man"], ["girl", "boy"], ["she", "he"], ["mother", "father"], ["her", "his"]]


def find(fixtures: Path) -> List[str]:
    """Paths in the folder of fixtures, of all experiments."""
    found = {*fixtures.rglob("*.jsonnet"), *fixtures.rglob("*experiment*.json")}
    names = [str(path.relative_to(fixtures)) for path in found if _BROKEN not in path.parts]
    return sorted([*names, *_OTHERS])


def read(fixtures: Path, name: str, folder: Path) -> Dict[str, Any]:
    """
    A config in which nothing is left to be downloaded. `folder` gets the files for that. An epoch
    or two are trained, and none ends the training early.
    """
    config = read_unchanged(fixtures, name, folder)
    trainer = config["trainer"]
    trainer.pop("patience", None)
    # They look for what only stand-ins with random weights have.
    trainer["run_confidence_checks"] = False
    if isinstance(trainer["optimizer"], dict) and trainer["optimizer"]["type"] == "adadelta":
        # With that of the files an update is lost in rounding.
        trainer["optimizer"]["lr"] = 1.0
    return config


def read_unchanged(fixtures: Path, name: str, folder: Path) -> Dict[str, Any]:
    """A config that differs from the file's in what it downloads and in the epochs alone."""
    config = Params.from_file(str(fixtures / name)).as_dict(quiet=True)
    config = _replaced(config, str(write_pairs(folder)))
    if config.get("vocabulary", {}) is None:
        del config["vocabulary"]
    trainer = config["trainer"]
    trainer["num_epochs"] = min(trainer.get("num_epochs", 20), MAX_EPOCHS)
    return config


def write_pairs(folder: Path) -> Path:
    """Writes words for the directions of a bias."""
    path = folder / "pairs.json"
    path.write_text(json.dumps(_PAIRS))
    return path


def with_sgd(config: Dict[str, Any]) -> Dict[str, Any]:
    """
    Returns the config with plain SGD at one rate, whose updates are as large as the gradients.
    """
    trainer = {**config["trainer"], "optimizer": {"type": "sgd", "lr": SGD_RATE}}
    for key in ("learning_rate_scheduler", "momentum_scheduler"):
        trainer.pop(key, None)
    return {**config, "trainer": trainer}


def _replaced(value: Any, pairs: str) -> Any:
    if isinstance(value, dict):
        if str(value.get("directory")).startswith("http"):
            return None
        return {key: _replaced(item, pairs) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, pairs) for item in value]
    return pairs if isinstance(value, str) and value.endswith("_pairs.json") else value


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def replace_models_of_spacy() -> None:
    """Has spaCy load a model without weights by any name."""
    common_util.LOADED_SPACY_MODELS.clear()
    mock.patch.object(spacy, "load", lambda name, **kwargs: spacy.blank("en")).start()


def install() -> None:
    """
    Has the model of each training begin with the same weights, each epoch of a data loader begin
    with a random state of its own, dropout be the same on each processor, and spaCy be there
    without its models.
    """
    replace_models_of_spacy()
    torch.nn.functional.dropout = _dropout
    if hasattr(torch.nn.functional, "scaled_dot_product_attention"):  # not in 2022
        attention = torch.nn.functional.scaled_dot_product_attention
        torch.nn.functional.scaled_dot_product_attention = functools.partial(_attention, attention)
    from_files = Vocabulary.from_files.__func__

    def seeded(cls: Any, *args: Any, **kwargs: Any) -> Any:
        vocabulary = from_files(cls, *args, **kwargs)
        seed(5)
        return vocabulary

    Vocabulary.from_files = classmethod(seeded)
    # It reads while it is constructed, and some readers choose at random.
    MultiProcessDataLoader.__init__ = _seeded(MultiProcessDataLoader.__init__)
    for loader in (MultiProcessDataLoader, MultiTaskDataLoader):
        loader.__iter__ = _seeded_epochs(loader.__iter__)


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    # On Intel's processors PyTorch 1.12 and today's draw other bits, but the same numbers.
    if not training or p == 0:
        return input
    mask = (torch.rand(input.shape) >= p).to(input).div_(1 - p)
    return input.mul_(mask) if inplace else input * mask


def _attention(
    function: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Optional[torch.Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    **kwargs: Any,
) -> torch.Tensor:
    if dropout_p == 0:
        return function(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **kwargs)
    scores = query @ key.transpose(-2, -1) * (scale or query.size(-1) ** -0.5)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return _dropout(scores.softmax(-1), dropout_p) @ value


def _seeded(function: Any) -> Any:
    @functools.wraps(function)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        seed(3)
        return function(*args, **kwargs)

    return seeded


def _seeded_epochs(iterate: Any) -> Any:
    """Gives each epoch a random state of its own, which forward passes between don't change."""

    def __iter__(self: Any) -> Iterator[TensorDict]:
        epoch = vars(self).setdefault("epoch_of_trial", 0)
        self.epoch_of_trial += 1
        outside = _random_state()
        seed(10_000 + epoch)
        for batch in iterate(self):
            inside = _random_state()
            _set_random_state(outside)
            yield batch
            outside = _random_state()
            _set_random_state(inside)
        _set_random_state(outside)

    return __iter__


def _random_state() -> Tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_random_state(state: Tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def prepare_each_forward(model: torch.nn.Module, ranks: Sequence[int]) -> None:
    """
    Has dropout, and what else is random, be that of the micro-batch, whichever process trains it,
    and an encoder that goes on with the states of the batch before do so with those of its rank.
    """
    count = 0
    stateful = [module for module in model.modules() if isinstance(module, _EncoderBase)]
    states: Dict[Any, Any] = {}

    def before(module: torch.nn.Module, *_: Any) -> None:
        nonlocal count
        if module.training and torch.is_grad_enabled():
            rank = ranks[count % len(ranks)]
            seed(100_000 + 10 * (count // len(ranks)) + rank)
            count += 1
            for encoder in stateful if len(ranks) > 1 else []:
                encoder._states = states.get((encoder, rank))

    def after(module: torch.nn.Module, *_: Any) -> None:
        if module.training and torch.is_grad_enabled():
            rank = ranks[(count - 1) % len(ranks)]
            states.update({(encoder, rank): encoder._states for encoder in stateful})

    model.register_forward_pre_hook(before)
    model.register_forward_hook(after)


@DataLoader.register("of_all_ranks")
class LoaderOfAllRanks(DataLoader):
    """The batches that several workers would have, in turn, in one process."""

    def __init__(
        self,
        reader: DatasetReader,
        data_path: Any,
        world_size: int,
        reader_params: Dict[str, Any],
        loader_params: Dict[str, Any],
    ) -> None:
        self._loaders = []
        for rank in range(world_size):
            with _as_rank(rank, world_size):
                own = DatasetReader.from_params(Params(copy.deepcopy(reader_params)))
                params = Params(copy.deepcopy(loader_params))
                self._loaders.append(
                    DataLoader.from_params(params, reader=own, data_path=data_path)
                )

    def __len__(self) -> int:
        return min(map(len, self._loaders)) * len(self._loaders)

    def __iter__(self) -> Iterator[TensorDict]:
        for batches in zip(*self._loaders):
            yield from batches

    def iter_instances(self) -> Iterator[Any]:
        for loader in self._loaders:
            yield from loader.iter_instances()

    def index_with(self, vocab: Vocabulary) -> None:
        for loader in self._loaders:
            loader.index_with(vocab)

    def set_target_device(self, device: torch.device) -> None:
        for loader in self._loaders:
            loader.set_target_device(device)


@contextmanager
def _as_rank(rank: int, world_size: int) -> Iterator[None]:
    with (
        mock.patch.object(common_util, "is_distributed", lambda: True),
        mock.patch.object(dist, "get_rank", lambda: rank),
        mock.patch.object(dist, "get_world_size", lambda: world_size),
    ):
        yield


def of_all_ranks(config: Dict[str, Any], world_size: int) -> Dict[str, Any]:
    """A config for one process, which trains what `world_size` workers would."""
    trainer = dict(config["trainer"])
    steps = trainer.get("num_gradient_accumulation_steps", 1)
    trainer["num_gradient_accumulation_steps"] = steps * world_size
    loader = {
        "type": "of_all_ranks",
        "world_size": world_size,
        "reader_params": config["dataset_reader"],
        "loader_params": config["data_loader"],
    }
    changed = {
        **config,
        "trainer": trainer,
        "validation_data_loader": config.get("validation_data_loader", config["data_loader"]),
        "data_loader": loader,
    }
    return copied(changed)


def copied(config: Dict[str, Any]) -> Dict[str, Any]:
    """Without sections that are one object, of which constructing takes the keys."""
    return json.loads(json.dumps(config))


def with_adam(config: Dict[str, Any], changes: Dict[str, float]) -> Optional[Dict[str, Any]]:
    """Returns the config with changes of its Adam; `None` with another optimizer."""
    optimizer = config["trainer"]["optimizer"]
    section = {"type": optimizer} if isinstance(optimizer, str) else optimizer
    if section["type"] not in ("adam", "adamw", "dense_sparse_adam", "huggingface_adamw"):
        return None
    return {**config, "trainer": {**config["trainer"], "optimizer": {**section, **changes}}}


def cells() -> List[Tuple[int, int]]:
    """World size and stage of ZeRO, of what is compared."""
    return [(1, 0), (2, 0), (2, 2), (2, 3)]
