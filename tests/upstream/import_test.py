"""What AllenNLP imports and calls of libraries, which these have dropped since."""

import importlib.util
import inspect
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import huggingface_hub
import torch
import transformers
from allennlp.common import cached_transformers
from allennlp.data import DatasetReader
from allennlp.data.dataset_readers.dataset_reader import DistributedInfo
from allennlp.data.token_indexers import pretrained_transformer_indexer
from allennlp.data.tokenizers import pretrained_transformer_tokenizer
from allennlp.modules.token_embedders import pretrained_transformer_embedder
from allennlp.modules.transformer import TransformerEmbeddings, transformer_module
from allennlp.training import gradient_descent_trainer, optimizers
from overrides.signature import ensure_signature_is_compatible
from tokenizers import Tokenizer

from tests.support.saved_tokenizers import FOLDER
from tests.upstream.unpatched import worked_around_by

# Without these AllenNLP couldn't have been imported here.
_TOKENIZERS = "allennlp_deepspeed_import_hook.former_tokenizers"
_ADAMW = "allennlp_deepspeed_import_hook.former_adamw"


@worked_around_by("shims")
def test_the_hub_has_dropped_classes() -> bool:
    # The package has a function of that name.
    module = importlib.import_module("allennlp.common.push_to_hf")
    is_dropped = not hasattr(huggingface_hub, "HfFolder")
    return is_dropped and _mentions(module, "HfFolder, Repository")


@worked_around_by("shims")
def test_transformers_have_dropped_an_optimizer() -> bool:
    is_dropped = optimizers.transformers.AdamW.__module__ == _ADAMW  # type: ignore[attr-defined]
    return is_dropped and _mentions(optimizers, "transformers.AdamW")


@worked_around_by("former_tokenizers")
def test_tokenizers_and_models_have_changed() -> bool:
    base: Any = transformers.PreTrainedTokenizerBase
    former = (base.encode_plus, base.build_inputs_with_special_tokens)
    is_dropped = {method.__module__ for method in former} == {_TOKENIZERS}
    return is_dropped and (
        _mentions(pretrained_transformer_tokenizer, ".encode_plus(")
        and _mentions(pretrained_transformer_indexer, ".build_inputs_with_special_tokens(")
        and _mentions(cached_transformers, "AutoTokenizer.from_pretrained")
    )


@worked_around_by("saved_tokenizers")
def test_transformers_replace_what_a_tokenizer_json_says() -> bool:
    directory = FOLDER / "T5"
    saved = Tokenizer.from_file(str(directory / "tokenizer.json"))
    loaded = transformers.AutoTokenizer.from_pretrained(directory).backend_tokenizer
    return str(loaded.pre_tokenizer) != str(saved.pre_tokenizer)


@worked_around_by("former_states")
def test_states_of_transformers_4_have_unexpected_keys() -> bool:
    """`tests/end_to_end/archives_of_2022_test.py` fails without the workaround."""
    config = transformers.BertConfig(num_hidden_layers=1, hidden_size=12, vocab_size=9)
    model = transformers.BertModel(config)
    state = {**model.state_dict(), "embeddings.position_ids": torch.arange(512)[None]}
    as_it_is = torch.nn.Module._load_from_state_dict.__wrapped__  # type: ignore[attr-defined]
    with mock.patch.object(torch.nn.Module, "_load_from_state_dict", as_it_is):
        return model.load_state_dict(state, strict=False).unexpected_keys != []


@worked_around_by("former_checkpoints")
def test_the_order_of_parameters_has_changed_and_states_go_by_it() -> bool:
    config = transformers.RobertaConfig(num_hidden_layers=1, hidden_size=12, vocab_size=9)
    names = [name for name, _ in transformers.RobertaModel(config).embeddings.named_parameters()]
    kinds = list(dict.fromkeys(name.partition(".")[0] for name in names))
    # That of transformers 4.20.
    former = ["word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm"]
    return kinds != former and _mentions(
        gradient_descent_trainer, 'self.optimizer.load_state_dict(training_state["optimizer"])'
    )


@worked_around_by("shims")
def test_the_toolkit_finds_no_safetensors() -> bool:
    # Run again as it is, since the module has been patched where it was imported.
    spec = importlib.util.find_spec("allennlp.modules.transformer.transformer_module")
    assert spec is not None
    unpatched = importlib.util.module_from_spec(spec)
    exec(compile(inspect.getsource(transformer_module), "unpatched", "exec"), vars(unpatched))
    as_it_is = unpatched.TransformerModule._get_pretrained_state_dict.__func__
    config = transformers.BertConfig(num_hidden_layers=1, hidden_size=12, vocab_size=9)
    with tempfile.TemporaryDirectory() as directory:
        transformers.BertModel(config).save_pretrained(directory)
        try:
            as_it_is(TransformerEmbeddings, directory)
        except Exception:
            return True
    return False


@worked_around_by("former_names")
def test_names_have_moved() -> bool:
    names = ("transformers.generation_utils", "transformers.modeling_bert")
    folder = Path(transformers.__file__).parent
    return not any((folder / f"{name.partition('.')[2]}.py").exists() for name in names)


@worked_around_by("shims.late_settings_of_transformers")
def test_an_embedder_sets_what_is_read_before() -> bool:
    with tempfile.TemporaryDirectory() as directory:
        config = transformers.BertConfig(num_hidden_layers=1, hidden_size=12, vocab_size=9)
        transformers.BertModel(config).save_pretrained(directory)
        model = transformers.AutoModel.from_pretrained(directory)
    model.config.update({"gradient_checkpointing": True})
    is_without = not model.is_gradient_checkpointing
    line = 'config.update({"gradient_checkpointing": gradient_checkpointing})'
    return is_without and _mentions(pretrained_transformer_embedder, line)


@worked_around_by("shims.uncompared_signatures")
def test_signatures_of_overriding_methods_are_compared() -> bool:
    def text_to_instance(self, text: str, labels: list = None): ...  # type: ignore[no-untyped-def]

    # The package has a function of that name.
    module = importlib.import_module("overrides.overrides")
    try:
        ensure_signature_is_compatible(DatasetReader.text_to_instance, text_to_instance)
    except TypeError:
        return _mentions(module, "ensure_signature_is_compatible(super_method, method")
    return False


@worked_around_by("shims.ranks_in_spawned_loader_workers")
def test_a_reader_without_a_process_group_does_not_shard_over_ranks() -> bool:
    class Sharding(DatasetReader):
        def __init__(self) -> None:
            super().__init__(manual_distributed_sharding=True, manual_multiprocess_sharding=True)

    reader = Sharding()
    reader._set_distributed_info(DistributedInfo(2, 1))
    as_it_is = DatasetReader.shard_iterable.__wrapped__  # type: ignore[attr-defined]
    return list(as_it_is(reader, range(4))) == [0, 1, 2, 3]


def _mentions(module: ModuleType, text: str) -> bool:
    return text in inspect.getsource(module)
