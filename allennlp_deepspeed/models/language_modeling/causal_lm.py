import json
import logging
import os
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Union

import torch
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.data.data_loaders import TensorDict
from allennlp.models import Model
from allennlp.models.model import _DEFAULT_WEIGHTS
from allennlp.nn import RegularizerApplicator
from typing_extensions import override

from allennlp_deepspeed import frozen_records
from allennlp_deepspeed.meta_model import is_without_weights
from allennlp_deepspeed.models import lora as adapters
from allennlp_deepspeed.models.language_modeling import packing, pretrained
from allennlp_deepspeed.models.language_modeling.attention_check import check_attention
from allennlp_deepspeed.models.language_modeling.chunked_cross_entropy import (
    IGNORED,
    TokenLosses,
    chunked_cross_entropy,
    unchunked_cross_entropy,
)
from allennlp_deepspeed.models.language_modeling.end_tokens import set_end_tokens
from allennlp_deepspeed.models.language_modeling.output_head import find_output_head
from allennlp_deepspeed.models.language_modeling.token_loss_model import (
    SequenceSharing,
    TokenLossModel,
)
from allennlp_deepspeed.models.language_modeling.token_metrics import TokenMetrics
from allennlp_deepspeed.training_traits import TrainingTraits

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_ROUTER_LOSS = (
    "the load-balancing loss of experts ('output_router_logits') isn't a mean over instances: "
    "write a number of accumulation steps, or \"output_router_logits\": false in 'model.config' or "
    "'model.transformer_kwargs'."
)

_NO_ROUTER_LOSS = (
    "write \"output_router_logits\": false in 'model.config' or 'model.transformer_kwargs'."
)


@Model.register("causal_lm")
class CausalLM(TokenLossModel):
    """
    Wraps any of transformers' causal language models. Takes the fields of the "causal_lm" reader:

    ```jsonnet
    "model": {"type": "causal_lm", "model_name": "HuggingFaceTB/SmolLM2-135M"}
    ```

    The loss is the mean over the target tokens. If the configuration of a mixture of experts has
    `"output_router_logits": true`, the load-balancing loss is added, which transformers compute for
    each batch. Logits are computed for a chunk of positions at a time, so that the logits of a full
    batch are never in memory. The metrics "perplexity" and "token_accuracy" weight each token
    equally, over the data of all ranks.

    The archive contains the transformer's configuration and the tokenizer, so that it can be opened
    where neither is available, unless `save_adapters_only` is set.

    Registered as a `Model` with name "causal_lm".

    # Parameters

    vocab : `Vocabulary`, required.
    model_name : `str`, optional (default = `None`)
        The name of a pretrained model, its directory, or a file that ends in `.gguf`.
    config : `Dict[str, Any]`, optional (default = `None`)
        Instead of `model_name`: the configuration of a model with random weights, such as
        `{"model_type": "llama", "hidden_size": 256}`.
    tokenizer : `str`, optional (default = `None`)
        The tokenizer that is saved in the archive: a name, a directory or a GGUF file. With the
        reader "causal_lm", leave it unset: the reader's tokenizer is saved, and a different one is
        refused. With another reader, set it to the reader's tokenizer. Otherwise the tokenizer of
        `model_name` is saved.
    load_weights : `bool`, optional (default = `True`)
        Whether to load the weights of `model_name`. `False` is set automatically when an archive is
        loaded.
    lora : `Dict[str, Any]`, optional (default = `None`)
        Adds trainable low-rank adapters to the transformer and freezes its weights. The keys are
        those of `peft`'s [`LoraConfig`](https://huggingface.co/docs/peft/package_reference/lora),
        such as `{"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}`. `modules_to_save` or
        `trainable_token_indices` train the embeddings and the output layer, of all or some tokens.
    save_adapters_only : `bool`, optional (default = `False`)
        Whether to leave the frozen weights of `model_name` out of `best.th` and the archive, which
        become small with `lora`. When the archive is loaded, the frozen weights are read from
        `model_name`. They must be bitwise the same as in training. If the model has moved, load the
        archive with `--overrides '{"model.model_name": "..."}'`.
    transformer_kwargs : `Dict[str, Any]`, optional (default = `None`)
        Further arguments of `AutoModelForCausalLM.from_pretrained` (or of `from_config`, if
        `config` is set), such as `attn_implementation`. `dtype` is a name such as `"bfloat16"`; the
        default is fp32.
    resize_embeddings : `bool`, optional (default = `False`)
        Whether to add embeddings for tokens that the tokenizer has and the model hasn't. New
        embeddings are initialized with the mean of the existing ones. With `lora`, its
        `modules_to_save` or `trainable_token_indices` must include them.
    loss_chunk_size : `int`, optional (default = `1024`)
        The number of positions whose logits are in memory at a time.
    regularizer : `RegularizerApplicator`, optional (default = `None`)
        As in AllenNLP. Its penalty is added to the loss.

    # Raises

    `ConfigurationError`
        If there is no such model, if it isn't causal, or if keys contradict each other.
    """

    default_predictor = "causal_lm"
    training_traits = TrainingTraits(
        averages_loss_over_tokens=True,
        validates_whole_set=True,
        computes_in_weights_dtype=True,
        shares_sequences=True,
    )

    def __init__(
        self,
        vocab: Vocabulary,
        model_name: Optional[str] = None,
        config: Optional[Dict[str, Any]] = None,
        tokenizer: Optional[str] = None,
        load_weights: bool = True,
        lora: Optional[Dict[str, Any]] = None,
        save_adapters_only: bool = False,
        transformer_kwargs: Optional[Dict[str, Any]] = None,
        resize_embeddings: bool = False,
        loss_chunk_size: int = 1024,
        regularizer: Optional[RegularizerApplicator] = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(vocab, regularizer, **kwargs)
        if (model_name is None) == (config is None):
            raise ConfigurationError(
                "Write one of 'model.model_name' (name or directory of a pretrained model) and "
                '\'model.config\' (for random weights, such as {"model_type": "llama", ...}).'
            )
        if save_adapters_only and (lora is None or model_name is None or not load_weights):
            raise ConfigurationError(
                "'model.save_adapters_only' is true, which needs 'model.lora' and the weights of "
                "'model.model_name': other weights would be lost. Remove the key."
            )
        if loss_chunk_size < 1:
            raise ConfigurationError(
                f"'model.loss_chunk_size' is {loss_chunk_size}: write a number of tokens of at "
                "least 1, such as 1024."
            )
        self.transformer = pretrained.load_transformer(
            model_name,
            config,
            transformer_kwargs or {},
            load_weights=load_weights,
            serialization_dir=self.serialization_dir,
            needs_all_weights=save_adapters_only,
        )
        _check_causal(self.transformer)
        loaded_tokenizer = pretrained.tokenizer_to_save(
            tokenizer, model_name, self.serialization_dir
        )
        new_tokens = self._resize_embeddings(loaded_tokenizer) if resize_embeddings else range(0)
        if loaded_tokenizer is not None:
            set_end_tokens(self.transformer, loaded_tokenizer)
        pretrained.save(self.serialization_dir, self.transformer, loaded_tokenizer)
        pretrained.compare_examples(self.serialization_dir, self.transformer)
        self._output_head = find_output_head(self.transformer)
        self._router_loss_factor = _router_loss_factor(
            self.transformer, has_output_head=self._output_head is not None
        )
        if self._output_head is None:
            logger.warning(
                "%s computes its logits in a custom way: for all positions of a batch at once. "
                "'model.loss_chunk_size' has no effect.",
                type(self.transformer).__name__,
            )
        if lora is not None:
            adapters.add_adapters(self.transformer, lora, "'model.lora'")
            _check_output_layer(self.transformer)
            _check_new_tokens(self.transformer, new_tokens)
            if load_weights and not is_without_weights():
                adapters.check_not_shared(self.transformer)
        self.training_traits = self._traits(save_adapters_only)
        # Whether batches of single examples and packed batches have been checked in this process. A
        # list, because checkpoints restore sets.
        self._checked_packing: List[bool] = []
        self._loss_chunk_size = loss_chunk_size
        self._metrics = TokenMetrics()

    def _traits(self, save_adapters_only: bool) -> TrainingTraits:
        traits = type(self).training_traits
        if save_adapters_only:
            parameters = self.named_parameters(remove_duplicate=False)
            names = frozenset(name for name, p in parameters if not p.requires_grad)
            traits = replace(traits, archived_elsewhere=names)
        if self._router_loss_factor != 0:
            traits = replace(traits, indivisible_loss=_ROUTER_LOSS)
        return traits

    @override
    def num_loss_tokens(
        self, labels: Optional[torch.Tensor] = None, **inputs: Any
    ) -> Union[int, torch.Tensor]:
        return 0 if labels is None else (self._targets(labels) != IGNORED).sum()

    def transformer_to_share(self) -> "PreTrainedModel":
        return self.transformer

    @override
    def forward(
        self,
        input_ids: torch.Tensor,
        labels: Optional[torch.Tensor] = None,
        position_ids: Optional[torch.Tensor] = None,
        attention_mask: Optional[torch.Tensor] = None,
        is_dummy: bool = False,
    ) -> Dict[str, torch.Tensor]:
        """
        Computes the loss, or the logits without labels. Padding is on the right, where causal
        attention doesn't look.

        # Parameters

        input_ids : `torch.Tensor`, required.
            Of shape (batch_size, length).
        labels : `torch.Tensor`, optional (default = `None`)
            Of shape (batch_size, length), the same tokens, and -100 for tokens without loss, such
            as padding.
        position_ids : `torch.Tensor`, optional (default = `None`)
            Of shape (batch_size, length). Packed examples of a row, which don't attend to each
            other, begin where it is 0.
        attention_mask : `torch.Tensor`, optional (default = `None`)
            Of shape (batch_size, length), 0 for padding and 1 for other tokens. Only the
            load-balancing loss of experts depends on it.
        is_dummy : `bool`, optional (default = `False`)
            Whether the batch is a `dummy_batch`, which has no loss.

        # Returns

        `Dict[str, torch.Tensor]`
            A scalar "loss" with labels; "logits" of shape (batch_size, length, vocabulary_size)
            without.
        """
        inputs = {"input_ids": input_ids, "use_cache": False}
        if position_ids is not None:
            inputs["position_ids"] = position_ids
        if labels is None:
            if self.sequence_sharing is not None:
                raise ConfigurationError(
                    "With 'trainer.sequence_parallel_size' each worker has the logits of a part "
                    "of each sequence: call the model with labels, or after training."
                )
            return {"logits": self.transformer(**inputs).logits}
        targets = self._targets(labels)
        if self._output_head is None:
            outputs = self._call(self.transformer, inputs)
            losses = unchunked_cross_entropy(outputs.logits, targets)
        else:
            outputs = self._call(self._output_head.backbone(self.transformer), inputs)
            losses = self._token_losses(outputs.last_hidden_state, targets)
        if self.sequence_sharing is not None and not self.training:
            losses = TokenLosses(*map(self.sequence_sharing.all_reduce, losses))
        self._metrics(losses)
        if is_dummy:
            return {}
        loss = losses.total / losses.num_targets.clamp(min=1)
        if self._router_loss_factor != 0:
            loss = loss + self._router_loss(outputs, input_ids, attention_mask)
        return {"loss": loss}

    def _router_loss(
        self, outputs: Any, input_ids: torch.Tensor, attention_mask: Optional[torch.Tensor]
    ) -> torch.Tensor:
        if self.sequence_sharing is not None:
            raise ConfigurationError(
                "With 'trainer.sequence_parallel_size' the load-balancing loss of experts would "
                f"be computed on parts of sequences: {_NO_ROUTER_LOSS}"
            )
        assert self._output_head is not None
        loss = self._output_head.router_loss(self.transformer, outputs, input_ids, attention_mask)
        return self._router_loss_factor * loss

    def _resize_embeddings(self, loaded_tokenizer: Optional["PreTrainedTokenizerBase"]) -> range:
        """Adds embeddings for new tokens, and returns these tokens."""
        if loaded_tokenizer is None:
            loaded_tokenizer = pretrained.saved_tokenizer(self.serialization_dir)
        if loaded_tokenizer is None:
            return range(0)
        return pretrained.resize_embeddings(self.transformer, loaded_tokenizer)

    def _call(self, module: torch.nn.Module, inputs: Dict[str, Any]) -> Any:
        """Returns the outputs of the transformer, or a part of it, checking its attention first."""
        if self.sequence_sharing is not None:
            return self._call_on_own_part(self.sequence_sharing, module, inputs)
        is_packed = "position_ids" in inputs
        if is_packed:
            packing.check_batch(self.transformer, inputs["input_ids"].size(0))
        if is_packed not in self._checked_packing:
            device = inputs["input_ids"].device
            check_attention(module, self.transformer, is_packed, device)
            self._checked_packing.append(is_packed)
        return module(**inputs)

    def _call_on_own_part(
        self, sharing: SequenceSharing, module: torch.nn.Module, inputs: Dict[str, Any]
    ) -> Any:
        """Returns the outputs for this rank's part of the sequences."""
        input_ids, position_ids = inputs["input_ids"], inputs.get("position_ids")
        is_packed = position_ids is not None
        if position_ids is None:
            position_ids = torch.arange(input_ids.size(1), device=input_ids.device)
            position_ids = position_ids.expand_as(input_ids)
        with sharing.forward_context(position_ids, is_packed) as own_positions:
            own_ids = sharing.shard(input_ids, 0)
            return module(**{**inputs, "input_ids": own_ids, "position_ids": own_positions})

    def _targets(self, labels: torch.Tensor) -> torch.Tensor:
        """Returns the token after each position, for this rank's part of the sequences."""
        # The token after each position.
        targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        sharing = self.sequence_sharing
        return targets if sharing is None else sharing.shard(targets, IGNORED)

    def _token_losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> TokenLosses:
        """
        Computes the losses of hidden states.

        # Parameters

        hidden : `torch.Tensor`, required.
            Of shape (batch_size, length, hidden_size).
        targets : `torch.Tensor`, required.
            Of shape (batch_size, length): the token after each position, -100 where there is no
            loss.
        """
        assert self._output_head is not None
        return chunked_cross_entropy(
            adapters.trained_module(self.transformer.get_output_embeddings()),
            hidden,
            targets,
            self._loss_chunk_size,
            self._output_head.adjust,
        )

    def dummy_batch(self, batch: TensorDict) -> TensorDict:
        """Returns a batch of the same shapes that isn't counted in loss or metrics."""
        labels = batch["labels"]
        assert isinstance(labels, torch.Tensor)
        return {**batch, "labels": torch.full_like(labels, IGNORED), "is_dummy": True}  # type: ignore[dict-item]

    @override
    def get_metrics(self, reset: bool = False) -> Dict[str, float]:
        """Returns the metrics of the epoch so far. With `reset`, every rank must call it."""
        return self._metrics.get_metric(reset)

    @override
    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        if frozen_records.RECORDS_KEY in state_dict:
            state_dict = frozen_records.complete(state_dict, self)
            # The base has been loaded in the dtype of `transformer_kwargs`.
            self.float()
        return super().load_state_dict(state_dict, strict)

    @classmethod
    @override
    def _load(
        cls,
        config: Params,
        serialization_dir: Union[str, PathLike],
        weights_file: Union[str, PathLike, None] = None,
        cuda_device: int = -1,
    ) -> "Model":
        """Loads an archive. Pretrained weights are read only if it has none."""
        path = weights_file or os.path.join(serialization_dir, _DEFAULT_WEIGHTS)
        needs_base = config["model"].pop("save_adapters_only", False) and (
            frozen_records.RECORDS_KEY in torch.load(path, mmap=True, weights_only=True)
        )
        config["model"]["load_weights"] = needs_base
        arguments = config["model"].get("transformer_kwargs") or {}
        # The weights of an archive are fp32, which flash attention doesn't support. A base is
        # loaded in the same dtype as for the training.
        for key in () if needs_base else ("dtype", "torch_dtype"):
            arguments.pop(key, None)
        if "flash" in str(arguments.get("attn_implementation")):
            arguments.pop("attn_implementation")
        try:
            model = super()._load(config, serialization_dir, weights_file, cuda_device)
        except frozen_records.PretrainedWeightsError as error:
            if not needs_base:
                raise
            raise ConfigurationError(
                "The archive has adapters only ('model.save_adapters_only'), and the weights of "
                f"'model.model_name' can't be used with them: {error} If they have moved, pass "
                '--overrides \'{"model.model_name": "..."}\'.'
            ) from error
        tokenizer = pretrained.saved_tokenizer(serialization_dir) if needs_base else None
        if tokenizer is not None:
            assert isinstance(model, CausalLM)
            set_end_tokens(model.transformer, tokenizer)
        return model


def _check_causal(transformer: "PreTrainedModel") -> None:
    """
    Checks that the transformer is causal.

    # Raises

    `ConfigurationError`
        If it is an encoder, which attends to the tokens that it predicts.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    config = transformer.config
    is_causal = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not is_causal:
        key = "causal" if hasattr(config, "causal") else "is_decoder"
        raise ConfigurationError(
            f"'model.type' is \"causal_lm\", but a model of type '{config.model_type}' isn't "
            f"causal: write \"{key}\": true in 'model.transformer_kwargs' (or in 'model.config'), "
            "or use another model."
        )


def _router_loss_factor(transformer: "PreTrainedModel", has_output_head: bool) -> float:
    """
    Returns the factor of the load-balancing loss of experts, 0 if the config doesn't enable it.

    # Raises

    `ConfigurationError`
        If the config enables it, and the loss can't be computed.
    """
    config = transformer.config.get_text_config()
    if not getattr(config, "output_router_logits", False):
        return 0.0
    names = ("router_aux_loss_coef", "aux_loss_coef")
    factors = [getattr(owner, name, None) for owner in (transformer, config) for name in names]
    factor = next((factor for factor in factors if factor is not None), None)
    if factor is None or not has_output_head:
        raise ConfigurationError(
            "'output_router_logits' is true in the model's configuration, but the load-balancing "
            f"loss of {type(transformer).__name__} is unknown: {_NO_ROUTER_LOSS}"
        )
    return float(factor)


def _check_output_layer(transformer: "PreTrainedModel") -> None:
    """
    Checks that the output layer has no low-rank adapters.

    # Raises

    `ConfigurationError`
        If it has. At stage 3 its adapters would be gathered once for each chunk, and ranks have
        different numbers of chunks.
    """
    output_layer = transformer.get_output_embeddings()
    if output_layer is not None and hasattr(adapters.trained_module(output_layer), "lora_A"):
        raise ConfigurationError(
            "'model.lora' adapts the output layer, whose logits are computed in chunks: remove it "
            "from 'target_modules', and to train it write it in 'modules_to_save'."
        )


def _check_new_tokens(transformer: "PreTrainedModel", new_tokens: range) -> None:
    """
    Checks that the embeddings and the output weights of new tokens are trained.

    # Raises

    `ConfigurationError`
        If adapters leave them frozen.
    """
    if not new_tokens:
        return
    names = {module: name.rpartition(".")[2] for name, module in transformer.named_modules()}
    layers = (transformer.get_input_embeddings(), transformer.get_output_embeddings())
    frozen = [layer for layer in layers if layer and not adapters.trains_tokens(layer, new_tokens)]
    if frozen:
        indices = f"std.range({new_tokens[0]}, {new_tokens[-1]})"
        rows = ", ".join(f'"{names[layer]}": {indices}' for layer in layers if layer)
        is_tied = transformer.config.get_text_config().tie_word_embeddings
        tying = ' and "ensure_weight_tying": true' if is_tied else ""
        raise ConfigurationError(
            f"'model.resize_embeddings' adds {len(new_tokens)} tokens, whose weights in "
            f"{' and '.join(repr(names[layer]) for layer in frozen)} 'model.lora' doesn't train: "
            f'write "trainable_token_indices": {{{rows}}} in it, or to train the weights of all '
            f'tokens "modules_to_save": {json.dumps([names[layer] for layer in layers if layer])}'
            f"{tying}."
        )
