"""Constructs a model whose parameters are partitioned over the ranks as they are created."""

import functools
import gc
import inspect
import logging
import os
import weakref
import zipfile
from collections import OrderedDict
from contextlib import ExitStack
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Hashable,
    Iterable,
    Iterator,
    List,
    Optional,
    Set,
    Tuple,
    Type,
)
from unittest import mock

import torch
import torch.distributed as dist
from allennlp.common import cached_transformers
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parameter import is_lazy

from allennlp_deepspeed.allennlp_patches import transformer_key
from allennlp_deepspeed.deepspeed_api import zero
from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.parameters.memory_format import support_any_layout
from allennlp_deepspeed.engine.parameters.model_check import has_precision
from allennlp_deepspeed.engine.parameters.overlapping_storage import overlapping_storage_error
from allennlp_deepspeed.engine.parameters.shared_attributes import (
    ReleasedMemory,
    shared_attribute_error,
)
from allennlp_deepspeed.engine.process import collectives
from allennlp_deepspeed.engine.process.process_environment import process_environment
from allennlp_deepspeed.engine.zero3.module_hooks import stage_3_environment

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_HALF_PRECISION = (torch.float16, torch.bfloat16)

# The maximum number of elements of parameters that constructors have accessed and that stay
# gathered at a time.
MAX_UNSHARDED_ELEMENTS = 50_000_000


def is_partitioned(partitioning: Dict[str, Any]) -> bool:
    """
    Returns whether a configuration partitions parameters.

    # Parameters

    partitioning : `Dict[str, Any]`
        The result of `DeepSpeedConfig.partitioning`.

    # Returns

    `bool`
        Whether the ZeRO stage is 3.
    """
    return partitioning.get("zero_optimization", {}).get("stage") == 3


class PartitionedConstruction:
    """
    Context manager in which modules are constructed as usual, but no rank ever has all of their
    parameters in memory: for ZeRO stage 3, with models that are larger than the memory of a rank.

    A module's parameters are partitioned when it is registered as a submodule. Any later access (a
    constructor that initializes its layers, AllenNLP's initializers, tied weights, an embedding
    that is extended with the vocabulary, loading a state dict, a deep copy) gathers them, in fp32
    on the CPU, as if they had not been partitioned. They are partitioned again when parameters
    accessed later have 50 million elements. So the values are those that the same constructors
    compute without it from the same seed. `deepspeed.zero.Init`, which it is based on, returns
    empty tensors there, and draws random numbers on the device.

    Every rank must enter it and construct the same model. The values of rank 0 are used. After it
    the model is ready for the engine.

    # Parameters

    partitioning : `Dict[str, Any]`, required.
        The result of `DeepSpeedConfig.partitioning`. Its ZeRO stage must be 3.
    device : `torch.device`, required.
        This worker's device.
    local_rank : `int`, required.
        The worker's rank on its node.
    """

    def __init__(self, partitioning: Dict[str, Any], device: torch.device, local_rank: int) -> None:
        # DeepSpeed requires a batch size.
        self._config = {**partitioning, "train_micro_batch_size_per_gpu": 1}
        self._device = device
        self._local_rank = local_rank
        # Partitioned parameters that are gathered now, the one accessed last at the end.
        self._unsharded: OrderedDict[int, Any] = OrderedDict()
        self._num_unsharded_elements = 0
        # Pairs that shared memory until one of them was partitioned.
        self._shared: List[Tuple[Parameter, Parameter]] = []
        self._released_memory = ReleasedMemory()
        # Parameters that have been partitioned, in the same order on each rank.
        self._partitioned: List[weakref.ref] = []
        # Names of the attributes that partitioned parameters have in addition to their own.
        self._added_attributes: Set[str] = set()
        self._is_in_from_pretrained = False
        self._undo = ExitStack()

    def __enter__(self) -> "PartitionedConstruction":
        with self._undo:
            self._undo.enter_context(process_environment(self._device, self._local_rank))
            self._undo.enter_context(support_any_layout())
            self._undo.enter_context(stage_3_environment())
            # The module is empty. It makes DeepSpeed install its linear function, which doesn't
            # reference full weights between forward and backward.
            self._partitioner = zero.Init(module=Module(), config_dict_or_path=self._config)
            self._dtype = self._partitioner.dtype
            self._observe()
            self._undo = self._undo.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Partitions all parameters again. Every rank must call it, unless it fails."""
        try:
            if exception == (None, None, None):
                self._partition_all_again()
        finally:
            self._undo.close()

    def finish(self, model: Module) -> None:
        """
        Partitions parameters that a constructor has added late, and moves buffers to this worker's
        device. Parameters outside of the model become plain ones again. Every rank must call it
        once the model is complete.

        # Raises

        `ConfigurationError`
            If two parameters share memory, or an attribute has that of a parameter.
        """
        self._partition_module(model)
        self._partition_all_again()
        self._unshard_hidden(model)
        # Reading names gathers the parameters.
        named = model.named_parameters() if self._shared else iter(())
        names = {parameter: name for name, parameter in named}
        for parameter, other in self._shared:
            if parameter in names and other in names:
                raise overlapping_storage_error(names[other], names[parameter], "at ZeRO stage 3")
        found = self._released_memory.find_attribute(model)
        if found is not None:
            names = {parameter: name for name, parameter in model.named_parameters()}
            if found[1] in names:
                raise shared_attribute_error(found[0], names[found[1]], "at ZeRO stage 3")
        for module in model.modules():
            for _, parameter in _own_parameters(module):
                is_half = parameter.dtype in _HALF_PRECISION and self._dtype == torch.float32
                if parameter.requires_grad and is_half:
                    self._mark_used(parameter)
                    parameter.data = parameter.data.float()
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self._device)

    def _observe(self) -> None:
        """Patches all accesses to parameters, so that they call this object."""
        for patch in (*self._access_patches(), *self._loading_patches()):
            self._undo.enter_context(patch)

        def _register_module(parent: Module, name: str, child: Optional[Module]) -> None:
            if child is not None:
                self._partition_module(child)

        self._undo.callback(register_module_module_registration_hook(_register_module).remove)

    def _access_patches(self) -> List[Any]:
        get_attribute = Module.__getattr__
        named_parameters = Module.named_parameters
        load_from_state_dict = Module._load_from_state_dict
        deepcopy_parameter = Parameter.__deepcopy__
        save_to_state_dict = Module._save_to_state_dict
        apply = Module._apply

        def __getattr__(module: Module, name: str) -> Any:
            value = get_attribute(module, name)
            if isinstance(value, Parameter):
                self._mark_used(value)
            return value

        def _named_parameters(
            module: Module, *args: Any, **kwargs: Any
        ) -> Iterator[Tuple[str, Parameter]]:
            for name, parameter in named_parameters(module, *args, **kwargs):
                self._mark_used(parameter)
                yield name, parameter

        def _load_from_state_dict(
            module: Module, state_dict: Dict[str, Any], prefix: str, *args: Any, **kwargs: Any
        ) -> None:
            partitioned = [name for name, p in _own_parameters(module) if internals.is_sharded(p)]
            for name in partitioned:
                if prefix + name in state_dict:
                    self._mark_used(module._parameters[name])
            load_from_state_dict(module, state_dict, prefix, *args, **kwargs)
            for name in partitioned:
                # The tensor of the state dict may have replaced the parameter.
                self._partition_first(module._parameters[name])

        def __deepcopy__(parameter: Parameter, memo: Dict[int, Any]) -> Parameter:
            is_copied = id(parameter) in memo
            self._mark_used(parameter)
            copy = deepcopy_parameter(parameter, memo)
            if internals.is_sharded(parameter) and not is_copied:
                self._partition_first(copy)
            return copy

        def _save_to_state_dict(module: Module, *args: Any, **kwargs: Any) -> None:
            if not self._is_in_from_pretrained:
                self._mark_own_used(module)
            save_to_state_dict(module, *args, **kwargs)

        def _apply(module: Module, *args: Any, **kwargs: Any) -> Module:
            self._mark_own_used(module)
            return apply(module, *args, **kwargs)

        return [
            mock.patch.object(Module, "__getattr__", __getattr__),
            mock.patch.object(Module, "named_parameters", _named_parameters),
            mock.patch.object(Module, "_load_from_state_dict", _load_from_state_dict),
            mock.patch.object(Parameter, "__deepcopy__", __deepcopy__),
            mock.patch.object(Module, "_save_to_state_dict", _save_to_state_dict),
            mock.patch.object(Module, "_apply", _apply),
        ]

    def _loading_patches(self) -> List[Any]:
        from transformers import PreTrainedModel

        from_pretrained = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]
        load = torch.load

        def _from_pretrained(cls: Type["PreTrainedModel"], *args: Any, **kwargs: Any) -> Any:
            # It reads the keys of state dicts of the full model, and not the values.
            with mock.patch.object(self, "_is_in_from_pretrained", True):
                model = from_pretrained(cls, *args, **kwargs)
            # Transformers construct it without weights, which they map from the file later.
            self._partition_module(model[0] if isinstance(model, tuple) else model)
            return model

        def load_mapped(f: Any, *args: Any, **kwargs: Any) -> Any:
            """Loads a file memory-mapped, without a copy in memory."""
            if isinstance(f, (str, os.PathLike)) and zipfile.is_zipfile(f):
                kwargs.setdefault("mmap", True)
            return load(f, *args, **kwargs)

        return [
            mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(_from_pretrained)),
            mock.patch.object(torch, "load", load_mapped),
            # Entries that are cached meanwhile are partitioned for this training only.
            mock.patch.dict(cached_transformers._model_cache, clear=True),
            mock.patch.object(cached_transformers, "get", _transformers_without_copies()),
        ]

    def _mark_own_used(self, module: Module) -> None:
        for _, parameter in _own_parameters(module):
            self._mark_used(parameter)

    def _mark_used(self, parameter: Any) -> None:
        """Gathers a parameter that is about to be accessed, if it has been partitioned."""
        if not internals.is_sharded(parameter):
            return
        if internals.is_released(parameter):
            parameter.all_gather()
            is_rounded = parameter.dtype == self._dtype
            parameter.data = parameter.data.to("cpu", torch.float32 if is_rounded else None)
            self._unsharded[id(parameter)] = parameter
            self._num_unsharded_elements += parameter.ds_numel
        if id(parameter) in self._unsharded:
            self._unsharded.move_to_end(id(parameter))
        while len(self._unsharded) > 1 and self._num_unsharded_elements > MAX_UNSHARDED_ELEMENTS:
            self._partition_again(next(iter(self._unsharded.values())))

    def _partition_module(self, module: Module) -> None:
        for submodule in module.modules():
            for parameter in submodule._parameters.values():
                if parameter is not None:
                    self._partition_first(parameter)

    def _partition_first(self, parameter: Any) -> None:
        if internals.is_sharded(parameter) or (self._is_in_from_pretrained and parameter.is_meta):
            return
        if is_lazy(parameter) or not has_precision(parameter):
            return  # the engine refuses it by name
        self._find_shared(parameter)
        self._released_memory.add(parameter)
        self._to_device(parameter)
        own_attributes = set(vars(parameter))
        internals.shard_parameter(self._partitioner, parameter)
        self._added_attributes |= set(vars(parameter)) - own_attributes
        self._partitioned.append(weakref.ref(parameter))

    def _partition_again(self, parameter: Any) -> None:
        self._forget_unsharded(parameter)
        if not internals.is_gathered(parameter):
            return  # a constructor that supports DeepSpeed has partitioned it
        self._find_shared(parameter)
        self._released_memory.add(parameter)
        self._to_device(parameter)
        if (parameter.shape, parameter.dtype) != (parameter.ds_shape, parameter.ds_tensor.dtype):
            internals.shard_parameter(self._partitioner, parameter)
            return
        # As bytes, because gloo doesn't support every dtype.
        dist.broadcast(parameter.data.view(-1).view(torch.uint8), src=0)
        parameter.partition(has_been_updated=True)

    def _partition_all_again(self) -> None:
        for parameter in list(self._unsharded.values()):
            self._partition_again(parameter)

    def _unshard_hidden(self, model: Module) -> None:
        """
        Turns partitioned parameters that still exist outside of the model into plain ones, on the
        CPU. The engine doesn't gather them: a frozen copy in a list, for example, which is how
        models keep a teacher out of their state dicts.
        """
        cached_transformers._model_cache.clear()
        gc.collect()
        in_model = {p for module in model.modules() for _, p in _own_parameters(module)}
        parameters = [reference() for reference in self._partitioned]
        are_hidden = [int(p is not None and p not in in_model) for p in parameters]
        # What only some ranks still have can't be gathered.
        are_on_all = collectives.all_reduce_min(are_hidden, self._device)
        hidden = [p for p, is_on_all in zip(parameters, are_on_all) if is_on_all]
        for parameter in hidden:
            self._mark_used(parameter)
            self._forget_unsharded(parameter)
            for name in self._added_attributes & set(vars(parameter)):
                delattr(parameter, name)
        if hidden and dist.get_rank() == 0:
            logger.info(
                "%d parameters aren't among those of the model, such as a module in a list. Each "
                "worker has all of their elements.",
                len(hidden),
            )

    def _forget_unsharded(self, parameter: Any) -> None:
        del self._unsharded[id(parameter)]
        self._num_unsharded_elements -= parameter.ds_numel

    def _find_shared(self, parameter: Parameter) -> None:
        """
        Finds gathered parameters that share memory with this one, which is about to be copied.
        """
        self._shared += [
            (parameter, other)
            for other in self._unsharded.values()
            if other is not parameter
            and other.data_ptr() == parameter.data_ptr() != 0
            and (other.requires_grad or parameter.requires_grad)
        ]

    def _to_device(self, parameter: Parameter) -> None:
        """
        Copies a parameter to the device, because it may be mapped from a file and is about to be
        written to. It is rounded as the engine rounds it: in half precision, and not if the engine
        refuses it by name.
        """
        is_rounded = (
            self._dtype in _HALF_PRECISION
            and parameter.is_floating_point()
            and has_precision(parameter)
        )
        parameter.data = parameter.data.to(
            self._device,
            self._dtype if is_rounded else None,
            copy=True,
            memory_format=torch.contiguous_format,
        )


def _own_parameters(module: Module) -> Iterable[Tuple[str, Parameter]]:
    return [(name, p) for name, p in module._parameters.items() if p is not None]


def _transformers_without_copies() -> Callable[..., "PreTrainedModel"]:
    """
    Returns a replacement of AllenNLP's `cached_transformers.get` for transformers that are too
    large for two copies in memory: it returns the transformer itself, and doesn't cache it. A
    repeated request loads it again, with the same random numbers for weights that aren't in the
    file.
    """
    get = cached_transformers.get
    cache: Dict[Any, Any] = cached_transformers._model_cache
    first_times: Dict[Hashable, Tuple[torch.Tensor, Callable[[], Any]]] = {}

    @functools.wraps(get)
    def get_without_copy(*args: Any, **kwargs: Any) -> "PreTrainedModel":
        call = inspect.signature(get).bind(*args, **kwargs)
        call.apply_defaults()
        key = transformer_key(call.arguments)
        if key in cache:
            return get(*args, **kwargs)
        make_copy, call.arguments["make_copy"] = call.arguments["make_copy"], False
        is_first = key not in first_times
        first_time = (torch.get_rng_state(), functools.partial(get, *call.args, **call.kwargs))
        random_state, load = first_times.setdefault(key, first_time)
        with torch.random.fork_rng(devices=[], enabled=not is_first):
            torch.set_rng_state(random_state)
            transformer = load()
        if make_copy:
            del cache[key]
        return transformer

    return get_without_copy
