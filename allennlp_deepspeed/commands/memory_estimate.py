"""
Estimates the memory of a config's model at each ZeRO stage and with each offload, before training.
"""

import math
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Dict, List, Optional, Tuple, Union

import torch
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.models.model import Model
from allennlp.training.optimizers import Optimizer

from allennlp_deepspeed.config.deepspeed_config import DeepSpeedConfig, TrainerSettings
from allennlp_deepspeed.config.global_batch import fill_batch_size
from allennlp_deepspeed.config.json_types import as_json
from allennlp_deepspeed.config.schema_validation import AUTO
from allennlp_deepspeed.config.settings import ResolvedConfig
from allennlp_deepspeed.engine.gradient_synchronizer import STEP
from allennlp_deepspeed.engine.lifecycle.model_state_memory import (
    CUDA_CONTEXT,
    NCCL_COMMUNICATOR,
    ModelSize,
    ModelStates,
    elements_of_modules,
    model_states,
    optimizer_bytes,
)
from allennlp_deepspeed.engine.optimizers.optimizer_check import check_optimizer, registered_class
from allennlp_deepspeed.engine.parameters.model_check import check_model
from allennlp_deepspeed.launch import train_command
from allennlp_deepspeed.meta_model import construct_without_weights
from allennlp_deepspeed.training.construction import freeze


@dataclass(frozen=True)
class Placement:
    """
    Placement of model states: a ZeRO stage and its offload.

    # Parameters

    name : `str`
    preset : `str`
        The closest preset of `DeepSpeedConfig`.
    changes : `Dict[str, Any]`
        Additions to the preset's `"zero_optimization"`.
    """

    name: str
    preset: str
    changes: Dict[str, Any]

    @property
    def stage(self) -> int:
        return int(self.name[0])


_TO_CPU: Dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}

# From the fastest to the slowest, in the order of Hugging Face's and DeepSpeed's advice: the least
# network traffic first, and offload to the host's memory before sharded weights.
PLACEMENTS = (
    Placement("0", "ds_config", {"stage": 0}),
    Placement("1", "zero_1", {}),
    Placement("2", "zero_2", {}),
    Placement("1, optimizer on CPU", "zero_1", _TO_CPU),
    Placement("2, optimizer on CPU", "zero_2_offload", {}),
    Placement("3", "zero_3", {}),
    Placement("3, optimizer on CPU", "zero_3", _TO_CPU),
    Placement("3, all on CPU", "zero_3_offload", {}),
    Placement("3, all on NVMe", "zero_3_nvme", {}),
)


@dataclass(frozen=True)
class PlacementEstimate:
    """
    Estimate of one placement.

    # Parameters

    placement : `Placement`
    deepspeed_config : `Union[str, Dict[str, Any]]`
        The value for the trainer's section of the config.
    states : `ModelStates`, optional
        The model states of one rank. `None` if the config can't be trained with this placement.
    problem : `str`, optional
        The reason why it can't.
    fits : `bool`, optional
        Whether it fits into memory. `None` if that of the GPUs that it needs is unknown.
    """

    placement: Placement
    deepspeed_config: Union[str, Dict[str, Any]]
    states: Optional[ModelStates] = None
    problem: Optional[str] = None
    fits: Optional[bool] = None


@dataclass(frozen=True)
class Estimate:
    """
    Estimate of all placements of a config's model.

    # Parameters

    size : `ModelSize`
    largest_parameter : `str`
    largest_module : `str`
        The names of the largest parameter and module.
    precision : `str`
    optimizer : `str`
    device_type : `str`
        The device that the model trains on, "cpu" or "cuda".
    workers : `int`
        The total number of workers.
    workers_per_node : `int`
    gpu_memory : `int`, optional
        Bytes of each GPU.
    cpu_memory : `int`
        Bytes of each node.
    nvme_memory : `int`
        Bytes of each node's NVMe device.
    placements : `List[PlacementEstimate]`
        The estimates, from the fastest to the slowest placement.
    """

    size: ModelSize
    largest_parameter: str
    largest_module: str
    precision: str
    optimizer: str
    device_type: str
    workers: int
    workers_per_node: int
    gpu_memory: Optional[int]
    cpu_memory: int
    nvme_memory: int
    placements: List[PlacementEstimate]

    @property
    def first_fitting(self) -> Optional[PlacementEstimate]:
        return next((estimate for estimate in self.placements if estimate.fits), None)


class Estimator:
    """
    Estimates the memory of a config's model.

    # Parameters

    params : `Params`
        A complete training configuration, with any trainer. It is not changed. The model is
        constructed, without allocating it if its constructor allows, and the data of its vocabulary
        are read. This machine need not be able to train it.
    workers : `int`, optional (default = `None`)
        The number of workers. `None` for the number in the config.
    model : `Model`, optional (default = `None`)
        The model of the config, if it has been constructed.

    # Raises

    `ConfigurationError`
        If training would refuse the config with any placement.
    """

    def __init__(
        self, params: Params, workers: Optional[int] = None, model: Optional[Model] = None
    ) -> None:
        params = params.duplicate()
        train_command.normalize_sections(params)
        train_command.check(params, on_this_machine=False)
        config = params.as_dict(quiet=True)
        config["trainer"] = self._trainer = config.get("trainer") or {}
        if not isinstance(self._trainer, dict):
            raise ConfigurationError(
                f"'trainer' is {as_json(self._trainer)}: must be an object, such as "
                '{"type": "deepspeed"}.'
            )
        self._config = DeepSpeedConfig.from_value(self._trainer.get("deepspeed_config"))
        self._settings = _settings(config, self._config, workers)
        self._precision = self._config.resolve(self._settings).precision
        self._requests_cpu = _requests_cpu(config)
        # Data loaders are constructed with the model, and need a batch size.
        fill_batch_size(params.params, num_workers=1)
        self._model = construct_without_weights(params) if model is None else model
        freeze(self._model, self._trainer.get("no_grad") or [])
        self._size, self._largest_parameter, self._largest_module = measure(self._model)
        optimizer = self._trainer.get("optimizer") or Optimizer.default_implementation
        self._optimizer = {"type": optimizer} if isinstance(optimizer, str) else optimizer
        if not self._size.trainable:
            raise ConfigurationError(
                "The model has no trainable parameter: see 'trainer.no_grad', and \"trainable\" "
                "or \"train_parameters\" in 'model'."
            )

    @property
    def nvme_paths(self) -> List[str]:
        """The directories on NVMe that the config names."""
        zero = self._config.config.get("zero_optimization", {})
        sections = [zero.get("offload_optimizer") or {}, zero.get("offload_param") or {}]
        return [section["nvme_path"] for section in sections if section.get("nvme_path")]

    def estimate(self, gpu_memory: Optional[int], cpu_memory: int, nvme_memory: int) -> Estimate:
        """
        Estimates all placements.

        # Parameters

        gpu_memory : `int`, optional
            Bytes of each GPU. If unset, a config whose workers are on the CPU is estimated for the
            CPU, and `fits` is `None` for others.
        cpu_memory : `int`
            Bytes of each node.
        nvme_memory : `int`
            Bytes of each node's NVMe device.
        """
        device_type = "cpu" if gpu_memory is None and self._requests_cpu else "cuda"
        placements = [self._estimate_placement(placement, device_type) for placement in PLACEMENTS]
        if gpu_memory is not None or device_type == "cpu":
            placements = [
                replace(
                    placement,
                    fits=self._fits(placement.states, gpu_memory, cpu_memory, nvme_memory),
                )
                for placement in placements
            ]
        section = self._config.config.get("optimizer")
        return Estimate(
            self._size,
            self._largest_parameter,
            self._largest_module,
            precision=self._precision,
            optimizer=section["type"] if section else self._optimizer_class.__name__,
            device_type=device_type,
            workers=self._settings.world_size,
            workers_per_node=self._workers_per_node,
            gpu_memory=gpu_memory,
            cpu_memory=cpu_memory,
            nvme_memory=nvme_memory,
            placements=placements,
        )

    @property
    def _workers_per_node(self) -> int:
        return self._settings.workers_per_node or self._settings.world_size

    @property
    def _optimizer_class(self) -> type:
        return registered_class(self._optimizer.get("type", Optimizer.default_implementation))

    @property
    def _saves_asynchronously(self) -> bool:
        checkpointer = self._trainer.get("checkpointer")
        return isinstance(checkpointer, dict) and bool(checkpointer.get("async_save"))

    def _optimizer_bytes(self) -> int:
        section = self._config.config.get("optimizer")
        if section is None:
            return optimizer_bytes(self._optimizer_class, self._optimizer, self._size)
        known = {name.lower(): kind for name, kind in vars(torch.optim).items()}
        # The others are DeepSpeed's, whose states take as much as Adam's or less.
        optimizer = known.get(section["type"].lower(), torch.optim.Adam)
        return optimizer_bytes(optimizer, section.get("params", {}), self._size)

    def _estimate_placement(self, placement: Placement, device_type: str) -> PlacementEstimate:
        config = _config_with(self._config.config, placement)
        pasted = config["type"] if config.keys() == {"type"} else config
        try:
            resolved = DeepSpeedConfig.from_value(
                {key: value for key, value in config.items() if key != "train_batch_size"}
            ).resolve(self._settings_for(placement))
            check_model(self._model, resolved)
            check_optimizer(self._optimizer, resolved, self._settings.world_size)
        except ConfigurationError as error:
            return PlacementEstimate(placement, pasted, problem=str(error))
        states = self._states(resolved)
        if device_type == "cuda":
            communicator = NCCL_COMMUNICATOR if self._settings.world_size > 1 else 0
            gpu = replace(states.gpu, runtime=CUDA_CONTEXT + communicator)
            states = replace(states, gpu=gpu)
        return PlacementEstimate(placement, pasted, states=states)

    def states_of_config(self) -> ModelStates:
        """Returns the model states of one rank with the placement of the config."""
        return self._states(self._config.resolve(self._settings))

    def _states(self, resolved: ResolvedConfig) -> ModelStates:
        return model_states(
            self._size,
            self._optimizer_bytes(),
            resolved,
            self._settings.world_size,
            self._settings.gradient_synchronization == STEP,
            has_chunks=self._trainer.get("grad_cache") is not None,
            has_moving_average=self._trainer.get("moving_average") is not None,
            saves_asynchronously=self._saves_asynchronously,
        )

    def _settings_for(self, placement: Placement) -> TrainerSettings:
        """Returns the settings without those that apply to other stages only."""
        settings = self._settings
        if placement.stage < 3:
            settings = replace(settings, reshard_after_micro_batch="auto")
        if placement.stage < 2:
            settings = replace(settings, gradient_synchronization="auto")
        return settings

    def _fits(
        self,
        states: Optional[ModelStates],
        gpu_memory: Optional[int],
        cpu_memory: int,
        nvme_memory: int,
    ) -> bool:
        if states is None:
            return False
        on_cpu = states.cpu.total
        if gpu_memory is None:
            # The model trains on the device that it would be offloaded to.
            on_cpu += states.gpu.total
        return (
            (gpu_memory is None or states.gpu.total <= gpu_memory)
            and on_cpu * self._workers_per_node <= cpu_memory
            and states.nvme.total * self._workers_per_node <= nvme_memory
        )


def measure(model: Model) -> Tuple[ModelSize, str, str]:
    """
    Measures the size of a model.

    # Returns

    `Tuple[ModelSize, str, str]`
        The size of a model, and the names of its largest parameter and its largest module.
    """
    parameters = dict(model.named_parameters())
    modules = elements_of_modules(model)
    return (
        ModelSize.from_model(model),
        max(parameters, key=lambda name: parameters[name].numel(), default=""),
        max(modules, key=lambda name: modules[name]),
    )


def _settings(
    config: Dict[str, Any], deepspeed_config: DeepSpeedConfig, workers: Optional[int]
) -> TrainerSettings:
    """Returns the settings of a training on GPUs, even if the config names none."""
    world_size = len(train_command.worker_devices(config)) if workers is None else workers
    num_nodes = (config.get("distributed") or {}).get("num_nodes", 1)
    settings = TrainerSettings.from_config(
        config,
        deepspeed_config.config,
        world_size=world_size,
        workers_per_node=math.ceil(world_size / num_nodes),
        device_type="cuda",
        serialization_dir="",
    )
    if workers is not None and settings.num_gradient_accumulation_steps == AUTO:
        # Model states don't depend on the number of instances that each worker reads.
        return replace(settings, num_gradient_accumulation_steps=2, global_batch_size=None)
    return settings


def _requests_cpu(config: Dict[str, Any]) -> bool:
    """Returns whether the config places its workers on the CPU, on any machine."""
    if config.get("distributed") is None:
        return config["trainer"].get("cuda_device") == -1
    return all(device < 0 for device in train_command.worker_devices(config))


def _config_with(config: Dict[str, Any], placement: Placement) -> Dict[str, Any]:
    """Returns `config` with this placement of its model states, as a preset with changes."""
    config = deepcopy(config)
    user_keys = config.pop("zero_optimization", {})
    preset = {} if placement.stage == 0 else DeepSpeedConfig.from_value(placement.preset).config
    placed = DeepSpeedConfig.merge(preset, {"zero_optimization": placement.changes})
    placed = placed["zero_optimization"]
    changes = dict(placement.changes)
    for key, value in user_keys.items():
        if key in ("offload_optimizer", "offload_param"):
            details = {k: v for k, v in (value or {}).items() if k != "device"}
            if key in placed and details:
                changes[key] = {**changes.get(key, {}), **details}
        elif key != "stage" and not (key == "zero_hpz_partition_size" and placement.stage < 3):
            changes[key] = value
    if placement.stage == 0:
        config.pop("data_types", None)
    if changes:
        config["zero_optimization"] = changes
    return {"type": placement.preset, **config} if placement.stage else config
