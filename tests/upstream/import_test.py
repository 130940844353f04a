"""What AllenNLP imports and calls of libraries, which these have dropped since."""

import importlib.util
import inspect
import tempfile
from types import ModuleType

import huggingface_hub
import transformers
from allennlp.common import cached_transformers, util
from allennlp.data import image_loader
from allennlp.data.token_indexers import pretrained_transformer_indexer
from allennlp.data.tokenizers import pretrained_transformer_tokenizer
from allennlp.fairness import fairness_metrics
from allennlp.modules.transformer import (
    TransformerEmbeddings,
    activation_layer,
    transformer_module,
)
from allennlp.training import optimizers
from allennlp.training.metrics import auc, evalb_bracketing_scorer
from transformers import processing_utils

from tests.upstream.unmended import mended_by

# Without these AllenNLP couldn't have been imported here. They do nothing where they aren't needed.
_SHIMS = "allennlp_deepspeed_import_hook.shims"


@mended_by("shims.former_classes_of_the_hub")
def test_the_hub_has_dropped_classes() -> bool:
    # The package has a function of that name.
    module = importlib.import_module("allennlp.common.push_to_hf")
    is_dropped = not hasattr(huggingface_hub, "HfFolder")
    return is_dropped and _mentions(module, "HfFolder, Repository")


@mended_by("shims.former_adamw")
def test_transformers_have_dropped_an_optimizer() -> bool:
    is_dropped = optimizers.transformers.AdamW.__module__ == _SHIMS  # type: ignore[attr-defined]
    return is_dropped and _mentions(optimizers, "transformers.AdamW")


@mended_by("shims.same_transformers")
def test_transformers_replace_themselves() -> bool:
    return _mentions(processing_utils, " = direct_transformers_import(")


@mended_by("shims.former_transformers")
def test_tokenizers_and_models_have_changed() -> bool:
    base = transformers.PreTrainedTokenizerBase
    former = (base.encode_plus, base.build_inputs_with_special_tokens)
    is_dropped = {method.__module__ for method in former} == {_SHIMS}
    return is_dropped and (
        _mentions(pretrained_transformer_tokenizer, ".encode_plus(")
        and _mentions(pretrained_transformer_indexer, ".build_inputs_with_special_tokens(")
        and _mentions(cached_transformers, "AutoTokenizer.from_pretrained")
    )


@mended_by("deferred.run")
def test_whoever_imports_allennlp_imports_much() -> bool:
    return (
        _mentions(util, "\nimport spacy\n")
        and _mentions(evalb_bracketing_scorer, "\nfrom nltk import Tree\n")
        and _mentions(activation_layer, "\nfrom transformers.models.bert.modeling_bert import")
        and _mentions(auc, "\nfrom sklearn import metrics\n")
        and _mentions(fairness_metrics, "\nfrom scipy.stats import wasserstein_distance\n")
        and _mentions(image_loader, "\nimport torchvision\n")
    )


@mended_by("deferred.base")
def test_an_optimizer_brings_the_models_of_transformers() -> bool:
    return _mentions(optimizers, "(Optimizer, transformers.Adafactor)")


@mended_by("shims.weights_of_today")
def test_the_toolkit_finds_no_safetensors() -> bool:
    # Run again as it is, since the module has been mended where it was imported.
    spec = importlib.util.find_spec("allennlp.modules.transformer.transformer_module")
    assert spec is not None
    unmended = importlib.util.module_from_spec(spec)
    exec(compile(inspect.getsource(transformer_module), "unmended", "exec"), vars(unmended))
    as_it_is = unmended.TransformerModule._get_pretrained_state_dict.__func__
    config = transformers.BertConfig(num_hidden_layers=1, hidden_size=12, vocab_size=9)
    with tempfile.TemporaryDirectory() as directory:
        transformers.BertModel(config).save_pretrained(directory)
        try:
            as_it_is(TransformerEmbeddings, directory)
        except Exception:
            return True
    return False


def _mentions(module: ModuleType, text: str) -> bool:
    return text in inspect.getsource(module)
