"""Gradient caching: contrastive training with batches of any size in the memory of a chunk."""

import inspect
import logging
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data.data_loaders import TensorDict
from allennlp.models import Model
from torch.utils._pytree import tree_map
from typing_extensions import override

from allennlp_deepspeed.checkpoint.attribute_encoding import fingerprint
from allennlp_deepspeed.checkpoint.attribute_states import AttributeStates
from allennlp_deepspeed.config.structured_keys import AUTO, GradCacheSettings
from allennlp_deepspeed.engine.lifecycle.profiler_ranges import BACKWARD, FORWARD, mark_phase, phase
from allennlp_deepspeed.engine.lifecycle.wrapped_model import DeepSpeedWrappedModel
from allennlp_deepspeed.engine.process import collectives
from allennlp_deepspeed.engine.process.random_states import (
    random_states,
    repeatable_random_states,
    set_random_states,
)
from allennlp_deepspeed.engine.zero3.prefetch_traces import PrefetchTraces
from allennlp_deepspeed.extensions.chunk_size import find_chunk_size
from allennlp_deepspeed.models.contrastive.contrastive_model import ContrastiveModel
from allennlp_deepspeed.training.callbacks import refuse_backward_callbacks
from allennlp_deepspeed.training.chunking import (
    Chunk,
    copy_batch,
    has_batch_statistics,
    num_examples,
    slice_rows,
    split_into_chunks,
    versions,
)
from allennlp_deepspeed.training.step_extension import StepContext, StepExtension

logger = logging.getLogger(__name__)


Representations = Dict[str, torch.Tensor]

# Relative to the norm, from kernels that compute otherwise with a graph, in half precision.
_MAX_DIFFERENCE = 0.05


class GradCache(StepExtension):
    """
    Runs forward and backward of a contrastive model for a batch whose activations don't fit into
    memory at once. This is Algorithm 1 of [Gao et al., 2021](https://arxiv.org/abs/2101.06983), at
    any ZeRO stage:

    1. `forward_no_graph` computes the representations of all chunks without a graph.
    2. `build_cache` computes the loss of all representations, over all ranks, and its gradient with
       respect to them. Parameters of the loss itself get their gradient here.
    3. `forward_backward` runs each chunk again, from the same random state, and backward from its
       part of the cached gradient. The last chunk of an optimizer step reduces the gradients of all
       chunks; with `gradient_synchronization` "micro_batch" each chunk reduces its own.

    The result is the gradient of the full batch. A batch that is one chunk on every rank runs one
    pass. Every rank must call each of these methods.

    At stage 3 each chunk gathers the parameters again, unless they stay gathered until the step
    ends (`reshard_after_micro_batch`).

    Apart from representations and inputs, only the random states grow with the batch, about 30 kB
    for each chunk. The host synchronizes with the device once a micro-batch, to read the numbers of
    examples of the other ranks.

    # Parameters

    value : `Dict[str, Any]`, required.
        The trainer's `grad_cache`.
    context : `StepContext`, required.
        The context of a `ContrastiveModel`. Its `gradient_synchronizer` treats chunks as
        micro-batches.

    # Raises

    `ConfigurationError`
        If the model doesn't support gradient caching.
    """

    makes_several_passes = True
    state_name = "grad_cache"

    def __init__(self, value: Dict[str, Any], context: StepContext) -> None:
        settings = GradCacheSettings.model_validate(value)
        self.check_model(settings, context.model)
        refuse_backward_callbacks(
            context.callbacks,
            "with 'trainer.grad_cache' there is no graph of the full batch: remove one of them.",
        )
        self._wrapped_model = context.wrapped_model
        self._engine: Any = context.wrapped_model.engine
        self._model: Any = self._engine.module
        self._gradient_synchronizer = context.gradient_synchronizer
        self._forward_prepared = context.forward_prepared
        self._prepare = context.prepare
        self._chunker = Chunker(settings, context.wrapped_model, self._encode)
        self._prefetch_traces = PrefetchTraces(self._engine)
        # Whether the second passes of a batch have been compared with the first ones, and the
        # representations that differed.
        self._is_checked = False
        self._differing: List[str] = []

    @staticmethod
    def check_model(settings: GradCacheSettings, model: Model) -> None:
        """
        Checks that the model supports gradient caching.

        # Raises

        `ConfigurationError`
            If the model can't be trained with these settings.
        """
        if not isinstance(model, ContrastiveModel):
            raise ConfigurationError(
                "'trainer.grad_cache' needs a model with `encode` and `contrastive_loss`, which "
                f"{type(model).__name__} doesn't have: derive it from "
                "`allennlp_deepspeed.models.contrastive.ContrastiveModel`, or remove "
                "'trainer.grad_cache'."
            )
        for name in settings.names:
            if not model.encodes(name):
                arguments = ", ".join(inspect.signature(model.encode).parameters)
                raise ConfigurationError(
                    f"'trainer.grad_cache.chunk_size.{name}' isn't an argument of `encode` of "
                    f"{type(model).__name__}, which has {arguments}."
                )
        parameters = inspect.signature(model.encode).parameters.values()
        required = [
            p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD
        ]
        if settings.names and required and len(parameters) > 1:
            raise ConfigurationError(
                "'trainer.grad_cache.chunk_size' has a number per argument, but `encode` of "
                f"{type(model).__name__} can't be called without '{required[0]}': give its "
                "arguments the default None, or write one number."
            )
        for name, module in model.named_modules():
            if has_batch_statistics(module):
                raise ConfigurationError(
                    f"'trainer.grad_cache' can't be used with {type(module).__name__} ('{name}'), "
                    "which would compute statistics over a chunk instead of the batch: use layer "
                    "normalization, or remove 'trainer.grad_cache'."
                )

    @override
    def train_on(
        self, batch: TensorDict, num_accumulation_steps: int, is_last: bool
    ) -> Dict[str, torch.Tensor]:
        """
        Runs forward and backward of one micro-batch. Every rank must call it.

        # Parameters

        batch : `TensorDict`, required.
            This rank's examples, at least one.
        num_accumulation_steps : `int`, required.
            The number of micro-batches of the optimizer step, which divides the loss.
        is_last : `bool`, required.
            Whether it is the last micro-batch of the step.

        # Returns

        `Dict[str, torch.Tensor]`
            The detached outputs of `contrastive_loss`.

        # Raises

        `ConfigurationError`
            If the loss isn't a scalar, if `encode` returns a different number of rows than
            examples, or if an input has no chunk size.
        """
        batch = self._prepare(batch)  # both passes of a chunk must see the same inputs
        chunks = self._chunker.chunks(batch)
        if len(chunks) == 1:
            with self._gradient_synchronizer.micro_batch(is_last):
                with phase(FORWARD):
                    outputs = self._forward_prepared(batch)
                self._backward(self._loss(outputs) / num_accumulation_steps)
            return _without_graph(outputs)
        return self._train_on_chunks(chunks, batch, num_accumulation_steps, is_last)

    def _train_on_chunks(
        self, chunks: List[Chunk], batch: TensorDict, num_accumulation_steps: int, is_last: bool
    ) -> Dict[str, torch.Tensor]:
        representations, states = self.forward_no_graph(chunks, num_examples(batch))
        for representation in representations.values():
            representation.requires_grad_(representation.is_floating_point())
        outputs = {}
        state_after = None
        attributes: Dict[str, Any] = {}
        for i, (chunk, state) in enumerate(zip(chunks, states)):
            with self._gradient_synchronizer.micro_batch(is_last and i == len(chunks) - 1):
                if i == 0:
                    with self._prefetch_traces.use("loss"):
                        outputs = self.build_cache(representations, batch, num_accumulation_steps)
                    state_after = random_states()
                    if not self._is_checked:
                        attributes = _attributes(self._model)
                set_random_states(state)
                with self._prefetch_traces.use("encode with a graph", *chunk.inputs):
                    self.forward_backward(chunk, representations)
        assert state_after is not None
        set_random_states(state_after)
        if not self._is_checked:
            self._check_second_passes(attributes)
        return outputs

    def forward_no_graph(
        self, chunks: List[Chunk], batch_size: int
    ) -> Tuple[Representations, List[Dict[str, Any]]]:
        """
        Computes the representations of all chunks without a graph.

        # Parameters

        chunks : `List[Chunk]`, required.
            The chunks of all examples of this rank. A chunk whose inputs `encode` changes in place
            is replaced by a copy of what it was, for the second pass.
        batch_size : `int`, required.
            The number of these examples.

        # Returns

        `Tuple[Dict[str, torch.Tensor], List[Dict[str, Any]]]`
            The representations, each of shape (batch_size, ...), converted from half precision to
            fp32, and the random states before each chunk.
        """
        states: List[Dict[str, Any]] = []
        batch_representations: Representations = {}
        for i, chunk in enumerate(chunks):
            states.append(repeatable_random_states())
            copy, versions_before = copy_batch(chunk.inputs), versions(chunk.inputs)
            with self._prefetch_traces.use("encode", *chunk.inputs), torch.no_grad():
                representations = self._encode(chunk)
            if versions(chunk.inputs) != versions_before:
                chunks[i] = chunk._replace(inputs=copy)
            if chunk.is_dummy:
                # Restored, as if there had been no dummy chunk.
                set_random_states(states[-1])
                continue
            for name, representation in representations.items():
                # The gradient is computed in full precision, whatever the dtype of the model.
                chunk_representation = _in_fp32(representation)
                if name not in batch_representations:
                    batch_representations[name] = chunk_representation.new_empty(
                        batch_size, *chunk_representation.shape[1:]
                    )
                batch_representations[name][chunk.rows] = chunk_representation
        return batch_representations, states

    def build_cache(
        self, representations: Representations, batch: TensorDict, num_accumulation_steps: int
    ) -> Dict[str, torch.Tensor]:
        """
        Computes the gradient of each representation that requires one. Gradients of the loss's own
        parameters are accumulated locally and reduced with those of the chunks.

        # Returns

        `Dict[str, torch.Tensor]`
            The detached outputs of `contrastive_loss`.

        # Raises

        `ConfigurationError`
            If the loss isn't a scalar.
        """
        # The loss scale in fp16. The engine multiplies by it in each backward pass, and the cached
        # gradient passes through two.
        scales: List[torch.Tensor] = []
        with self._gradient_synchronizer.no_sync():
            with self._wrapped_model.replace_forward(self._model.loss_over_ranks):
                inputs = {
                    "representations": representations,
                    "loss_inputs": self._model.loss_inputs(batch),
                }
                with phase(FORWARD):
                    outputs = self._forward_prepared(inputs)
            loss = self._loss(outputs) / num_accumulation_steps
            loss.register_hook(scales.append)
            self._backward(loss)
        for representation in representations.values():
            if representation.grad is not None:
                representation.grad.div_(scales[0])
        return _without_graph(outputs)

    def forward_backward(self, chunk: Chunk, cache: Representations) -> None:
        """
        Runs a chunk forward, and backward from its part of the cached gradient.

        # Parameters

        chunk : `Chunk`, required.
            A chunk of the batch.
        cache : `Dict[str, torch.Tensor]`, required.
            The representations of the batch with their gradients.
        """
        # Its gradient with respect to the parameters is that of the loss.
        surrogate: Optional[torch.Tensor] = None
        for name, representation in self._encode(chunk).items():
            if not representation.requires_grad:
                continue
            if not (self._is_checked or chunk.is_dummy):
                first = cache[name][chunk.rows].detach()
                difference = _in_fp32(representation).detach() - first
                if difference.norm() > _MAX_DIFFERENCE * first.norm():
                    self._differing.append(name)
            gradient = cache[name].grad
            if gradient is None or chunk.is_dummy:
                product = 0 * representation.sum()
            else:
                product = (_in_fp32(representation) * gradient[chunk.rows]).sum()
            surrogate = product if surrogate is None else surrogate + product
        if surrogate is not None:
            self._backward(surrogate)
        else:
            # The encoder is frozen. The last chunk still has to finish the reduction, which a
            # backward pass would have done.
            with self._gradient_synchronizer.no_sync():
                pass

    def _check_second_passes(self, attributes: Dict[str, Any]) -> None:
        """
        Checks that the second passes of a batch have repeated the first ones.

        # Parameters

        attributes : `Dict[str, Any]`, required.
            The model's `_attributes` before the second passes.

        # Raises

        `ConfigurationError`
            If `encode` changes the state of the model in each pass, or returns something else.
        """
        self._is_checked = True
        after = _attributes(self._model)
        changed = [
            name
            for name, value in after.items()
            # The position of an iterator isn't known.
            if value == value and value != attributes.get(name, value)
        ]
        encode = f"`encode` of {type(self._model).__name__}"
        if changed:
            raise ConfigurationError(
                f"{encode} changes {', '.join(changed)}, but 'trainer.grad_cache' runs it twice "
                "for each chunk: change it in `contrastive_loss`, which runs once a batch, or "
                "remove 'trainer.grad_cache'."
            )
        if self._differing:
            raise ConfigurationError(
                f"{encode} returned another '{self._differing[0]}' when 'trainer.grad_cache' ran "
                "it again with the same examples: it must depend on nothing but its inputs, the "
                "weights and the global random states. A generator of its own and inputs that it "
                "changes through `.data` or NumPy can't be repeated."
            )

    @override
    def state_dict(self) -> Dict[str, Any]:
        """Returns the chunk sizes that were found."""
        return self._chunker.state_dict()

    @override
    def load_state_dict(self, state_dict: Any) -> None:
        self._chunker.load_state_dict(state_dict)

    @mark_phase(BACKWARD)
    def _backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)

    @mark_phase(FORWARD)
    def _encode(self, chunk: Chunk) -> Representations:
        # Dictionaries of its own, which `encode` may change.
        inputs = tree_map(lambda leaf: leaf, chunk.inputs)
        with self._wrapped_model.replace_forward(self._model.encode):
            representations = self._engine(**inputs)
        num_rows = num_examples(chunk.inputs)
        for name, representation in representations.items():
            if representation.shape[:1] != (num_rows,):
                raise ConfigurationError(
                    f"`encode` of {type(self._model).__name__} returned '{name}' of shape "
                    f"{tuple(representation.shape)} for {num_rows} examples: it needs a row per "
                    "example."
                )
        return representations

    def _loss(self, outputs: Dict[str, torch.Tensor]) -> torch.Tensor:
        loss = outputs["loss"]
        if loss.dim() > 0:
            raise ConfigurationError(
                f"The loss of {type(self._model).__name__} has shape {tuple(loss.shape)}, but "
                "'trainer.grad_cache' needs a scalar over all examples: return the mean."
            )
        return loss


def _without_graph(outputs: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """Detaches the tensors among a model's outputs."""
    return {
        name: value.detach() if isinstance(value, torch.Tensor) else value
        for name, value in outputs.items()
    }


def _attributes(model: torch.nn.Module) -> Dict[str, Any]:
    """Returns fingerprints of the attributes and buffers of a model by name."""
    attributes = {
        f"{module}.{name}".lstrip("."): value
        for module, values in AttributeStates(model).fingerprints().items()
        for name, value in values.items()
    }
    buffers = {name: fingerprint({"value": value}) for name, value in model.named_buffers()}
    return {**attributes, **buffers}


def _in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class Chunker:
    """
    Divides batches into chunks. A chunk size that it finds stays in use for the rest of training.

    # Parameters

    settings : `GradCacheSettings`, required.
    wrapped_model : `DeepSpeedWrappedModel`, required.
        A `ContrastiveModel`.
    encode : `Callable`, required.
        Computes the representations of a chunk.
    """

    def __init__(
        self,
        settings: GradCacheSettings,
        wrapped_model: DeepSpeedWrappedModel,
        encode: Callable[[Chunk], Representations],
    ) -> None:
        self._wrapped_model = wrapped_model
        self._device = wrapped_model.engine.device
        self._model: Any = wrapped_model.engine.module
        self._encode = encode
        self._chunk_size = settings.chunk_size
        self._found_chunk_size: Optional[int] = None

    def chunks(self, batch: TensorDict) -> List[Chunk]:
        """
        Divides a batch into the same number of chunks on every rank, because at ZeRO stage 3 all
        ranks run the same passes. Every rank must call it.

        # Raises

        `ConfigurationError`
            If an input has no chunk size.
        """
        inputs = self._model.encoder_inputs(batch)
        batch_size = num_examples(batch)
        if self._chunk_size == AUTO:
            self._chunk_size = self._found_chunk_size = self._find_chunk_size(inputs, batch_size)
        max_batch_size = max(
            size for (size,) in collectives.all_gather_integers([batch_size], self._device)
        )
        return [
            chunk
            for group_inputs, chunk_size in self._groups(inputs)
            for chunk in split_into_chunks(group_inputs, batch_size, max_batch_size, chunk_size)
        ]

    def state_dict(self) -> Dict[str, Any]:
        """Returns the chunk size that "auto" has found."""
        return {"chunk_size": self._found_chunk_size}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """
        Restores the chunk size found before an interruption, unless the settings now have a number.
        """
        chunk_size = state["chunk_size"]
        if self._chunk_size == AUTO and chunk_size is not None:
            self._chunk_size = self._found_chunk_size = chunk_size
            logger.info("Resumed: 'trainer.grad_cache.chunk_size' is %d.", chunk_size)

    def _groups(self, inputs: TensorDict) -> List[Tuple[TensorDict, int]]:
        """Returns the inputs that are encoded together, and their chunk size."""
        if not isinstance(self._chunk_size, dict):
            return [(inputs, int(self._chunk_size))]
        missing = sorted(inputs.keys() - self._chunk_size.keys())
        if missing:
            raise ConfigurationError(
                f"'trainer.grad_cache.chunk_size' has no '{missing[0]}', which the data has: add "
                "it, or write one number for all."
            )
        return [
            ({name: inputs[name]}, chunk_size)
            for name, chunk_size in self._chunk_size.items()
            if name in inputs
        ]

    def _find_chunk_size(self, inputs: TensorDict, batch_size: int) -> int:
        def encode(chunk_size: int) -> Representations:
            rows = slice(0, min(chunk_size, batch_size))
            copy = copy_batch(slice_rows(inputs, rows.start, rows.stop))
            return self._encode(Chunk(copy, rows, True))

        return find_chunk_size("'grad_cache.chunk_size'", encode, batch_size, self._wrapped_model)
