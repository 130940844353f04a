from dataclasses import dataclass
from typing import Any, Dict, Optional, Union


@dataclass
class TrainerSettings:
    """
    What the AllenNLP side of a config file says. `None` stands for a key that it does not give.

    # Parameters

    num_gradient_accumulation_steps : `int`, optional (default = `None`)
    gradient_synchronization : `str`, optional (default = `"auto"`)
    grad_norm : `Union[float, bool]`, optional (default = `None`)
        `False`, as 0, is no clipping.
    use_amp : `bool`, optional (default = `None`)
    grad_scaling : `bool`, optional (default = `True`)
    optimizer : `str`, optional (default = `None`)
        The registered name or the class name of the AllenNLP optimizer.
    learning_rate : `float`, optional (default = `None`)
        That of the AllenNLP optimizer.
    learning_rate_scheduler : `str`, optional (default = `None`)
        The registered name or the class name of the AllenNLP scheduler.
    micro_batch_size : `int`, optional (default = `None`)
        The data loader's batch size. `None` if it is not known or varies.
    num_epochs : `int`, optional (default = `None`)
    batches_per_epoch : `int`, optional (default = `None`)
        In micro-batches.
    world_size : `int`, optional (default = `1`)
    device_type : `str`, optional (default = `"cpu"`)
        "cpu" or "cuda".
    bf16_supported : `bool`, optional (default = `True`)
        Whether the device computes in bf16.
    serialization_dir : `str`, optional (default = `None`)
    shard_within : `Union[int, str]`, optional (default = `None`)
        "node" or a number of workers.
    workers_per_node : `int`, optional (default = `None`)
        `None` if it is not known, which only matters to a `shard_within` of "node".
    """

    num_gradient_accumulation_steps: Optional[int] = None
    gradient_synchronization: str = "auto"
    grad_norm: Union[float, bool, None] = None
    use_amp: Optional[bool] = None
    grad_scaling: bool = True
    optimizer: Optional[str] = None
    learning_rate: Optional[float] = None
    learning_rate_scheduler: Optional[str] = None
    micro_batch_size: Optional[int] = None
    num_epochs: Optional[int] = None
    batches_per_epoch: Optional[int] = None
    world_size: int = 1
    device_type: str = "cpu"
    bf16_supported: bool = True
    serialization_dir: Optional[str] = None
    shard_within: Union[int, str, None] = None
    workers_per_node: Optional[int] = None


@dataclass(frozen=True)
class ResolvedConfig:
    """
    A configuration with nothing left to fill in.

    # Parameters

    engine_config : `Dict[str, Any]`
        What `deepspeed.initialize` takes. Its gradient accumulation is always 1: the trainer, not
        the engine, knows where an accumulated batch ends.
    num_gradient_accumulation_steps : `int`
        What the user means, for the trainer.
    grad_norm : `Union[float, bool]`
        The norm that gradients are clipped to, `True` to report their norm without clipping, or
        `False`.
    zero_stage : `int`
    precision : `str`
        "fp32", "bf16", "fp16" or "torch_autocast".
    has_optimizer : `bool`
        Whether DeepSpeed builds the optimizer.
    has_scheduler : `bool`
        Whether DeepSpeed builds the learning rate scheduler.
    offload_device : `str`
        Where the states of the optimizer are, and where it steps: "cpu" or "nvme", which is on the
        CPU too, or "none" if it is the device that the model trains on.
    forces_cpu_optimizer : `bool`, optional
        What the config says for `zero_force_ds_cpu_optimizer`, `None` if it leaves it open.
    """

    engine_config: Dict[str, Any]
    num_gradient_accumulation_steps: int
    grad_norm: Union[float, bool]
    zero_stage: int
    precision: str
    has_optimizer: bool
    has_scheduler: bool
    offload_device: str
    forces_cpu_optimizer: Optional[bool]
