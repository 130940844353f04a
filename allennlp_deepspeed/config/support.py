"""
Which of DeepSpeed's sections, and of the keys of its "zero_optimization", do what they say in an
AllenNLP trainer. What DeepSpeed adds is refused until it is tested here.
"""

from typing import Any, Dict, Iterator, Tuple, Type

from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION, DeepSpeedZeroConfig
from pydantic import BaseModel

from allennlp_deepspeed.config.schema import Schema

SUPPORTED = {
    "activation_checkpointing",
    "aio",
    "bf16",
    "checkpoint",
    "comet",
    "comms_logger",
    "communication_data_type",
    "csv_monitor",
    "data_types",
    "dump_state",
    "flops_profiler",
    "fp16",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "log_level",
    "memory_breakdown",
    "optimizer",
    "scheduler",
    "steps_per_print",
    "tensorboard",
    "timers",
    "torch_autocast",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "vocabulary_size",
    "wall_clock_breakdown",
    "wandb",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization",
    *(
        f"{ZERO_OPTIMIZATION}.{key}"
        for key in (
            "allgather_bucket_size",
            "compute_grad_norm",
            "contiguous_gradients",
            "cpu_offload",
            "cpu_offload_param",
            "cpu_offload_use_pin_memory",
            "enable_sanity_checks",
            "leaf_module",
            "log_trace_cache_warnings",
            "memory_efficient_linear",
            "offload_optimizer",
            "offload_param",
            "overlap_comm",
            "reduce_bucket_size",
            "reduce_scatter",
            "save_muon_momentum_buffer_in_memory",
            "stage",
            "stage3_allgather_sequential",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_model_persistence_threshold",
            "stage3_param_persistence_threshold",
            "stage3_prefetch_bucket_size",
            "stage3_use_all_reduce_for_fetch_params",
            "sub_group_size",
            "use_multi_rank_bucket_allreduce",
            "zero_hpz_partition_size",
        )
    ),
}

_QUANTIZED = (
    "what crosses the network is rounded, by kernels for GPUs that aren't tested here; remove the "
    "key"
)

# What can't work inside an AllenNLP trainer: the key, the values that leave it turned off, and why
# no other will do.
UNSUPPORTED: Dict[str, Tuple[Tuple[Any, ...], str]] = {
    "pipeline": ((), "an AllenNLP model is no sequence of pipeline stages; use ZeRO stage 3"),
    "tensor_parallel.autotp_size": ((0,), "its workers read different instances; use ZeRO stage 3"),
    "sequence_parallel_size": ((1,), "it is a key of the trainer; write it there"),
    "data_parallel_size": ((), 'it is the length of "distributed.cuda_devices"; remove the key'),
    "expert_parallel.enabled": ((False,), "its modules don't fit an archive; remove the section"),
    "hybrid_engine.enabled": ((False,), "its modules don't fit an archive; remove the section"),
    "autotuning.enabled": ((False,), "it drives DeepSpeed's own launcher; remove the section"),
    "data_efficiency.enabled": (
        (False,),
        'choose the batches in "data_loader"; remove the section',
    ),
    "checkpoint.load_universal": (
        (False,),
        "it expects another kind of checkpoint; remove the key",
    ),
    "checkpoint.writer.decoupled": (
        (False,),
        "a checkpoint is committed when it is complete; remove the key",
    ),
    "datastates_ckpt": ((), "a checkpoint is committed when it is complete; remove the section"),
    "activation_checkpointing.partition_activations": (
        (False,),
        "the workers that would share an activation compute on different instances, so that each "
        'would only copy its own; remove the key, or write "cpu_checkpointing": true',
    ),
    "activation_checkpointing.contiguous_memory_optimization": (
        (False,),
        "it is a part of partition_activations; remove the key",
    ),
    "activation_checkpointing.number_checkpoints": (
        (None,),
        "only contiguous_memory_optimization reads it; remove the key",
    ),
    "zero_optimization.round_robin_gradients": (
        (False,),
        "DeepSpeed then takes the fp32 weights of one parameter for those of another; remove the "
        "key",
    ),
    "zero_optimization.elastic_checkpoint": (
        (False,),
        "neither recovery nor `allennlp deepspeed export` reads its checkpoints, and those without "
        "it are converted for any number of workers by `allennlp train --recover`; remove the key",
    ),
    "dataloader_drop_last": ((False,), 'write "drop_last" in "data_loader" instead'),
    "managed_gradient_accumulation": (
        (),
        'the trainer says where an accumulated batch ends; use "num_gradient_accumulation_steps"',
    ),
    "compile": (
        ({}, {"deepcompile": False}),
        "DeepCompile reduces gradients inside what it compiles, by an operator for NCCL, and takes "
        "away what reduces those of the parts that stay outside, which AllenNLP's models have; "
        'remove the section, and write "torch_compile": true in the trainer',
    ),
    "disable_allgather": ((False,), "DeepSpeed reads it nowhere; remove the key"),
    "disable_python_gc": ((False,), "it would be off after the training too; remove the key"),
    "gradient_allreduce_op": (
        ("mean",),
        "steps would grow with the number of workers; remove the key, and write a larger learning "
        "rate",
    ),
    "gradient_predivide_factor": (
        (1,),
        "DeepSpeed can't do it with ZeRO, and the gradient is the same; remove the key",
    ),
    "prescale_gradients": (
        (False,),
        "DeepSpeed can't do it with ZeRO, and the gradient is the same; remove the key",
    ),
    "seq_parallel_communication_data_type": (
        (),
        "gradients are reduced over all workers alike; write communication_data_type",
    ),
    "tensor_parallel.tp.tp_size": (
        (1,),
        "its workers read different instances; use ZeRO stage 3",
    ),
    "use_data_before_expert_parallelism": (
        (False,),
        "there is no expert parallelism; remove the key",
    ),
    "weight_quantization": (
        ({}, {"enabled": False}),
        "DeepSpeed quantizes weights for inference only; remove the section",
    ),
    "zero_optimization.allgather_partitions": (
        (True,),
        "DeepSpeed reads it nowhere; remove the key",
    ),
    "zero_optimization.ignore_unused_parameters": (
        (True,),
        "the trainer itself says which parameters workers use differently; remove the key",
    ),
    "zero_optimization.legacy_stage1": ((False,), "DeepSpeed no longer has it; remove the key"),
    "zero_optimization.load_from_fp32_weights": (
        (True,),
        "a recovered training would go on from rounded weights; remove the key",
    ),
    "zero_optimization.override_module_apply": (
        (True,),
        "models are constructed partitioned in another way; remove the key",
    ),
    "zero_optimization.parameter_alignment": (
        (False,),
        "checkpoints are resized and exported without gaps between parameters; remove the key",
    ),
    "zero_optimization.pipeline_loading_checkpoint": (
        (False,),
        "an AllenNLP model is no sequence of pipeline stages; remove the key",
    ),
    "zero_optimization.stage3_module_granularity_threshold": (
        (0,),
        "DeepSpeed then chooses which modules are gathered as one; name them in "
        '"leaf_module" instead',
    ),
    "zero_optimization.zenflow": (
        (),
        "parts of the weights are stepped later than the schedule, metrics and checkpoints say; "
        'remove the section, "offload_optimizer" works without it',
    ),
    "zero_optimization.zero_quantized_gradients": ((False,), _QUANTIZED),
    "zero_optimization.zero_quantized_nontrainable_weights": ((False,), _QUANTIZED),
    "zero_optimization.zero_quantized_weights": ((False,), _QUANTIZED),
}


def unlisted(config: Dict[str, Any]) -> Iterator[str]:
    """The paths of a config's known keys that are neither supported nor named with a reason."""
    listed = {*SUPPORTED, *(".".join(path.split(".")[:2]) for path in UNSUPPORTED)}
    listed |= {path.split(".")[0] for path in listed}
    zero = config.get(ZERO_OPTIMIZATION)
    for prefix, section, model in (
        ("", config, Schema),
        (f"{ZERO_OPTIMIZATION}.", zero if isinstance(zero, dict) else {}, DeepSpeedZeroConfig),
    ):
        for key, name in _names(model):
            if key in section and f"{prefix}{name}" not in listed:
                yield f"{prefix}{key}"


def _names(model: Type[BaseModel]) -> Iterator[Tuple[str, str]]:
    """Every name of a key, with the one that DeepSpeed documents."""
    for key, field in model.model_fields.items():
        for name in {key, field.alias or key}:
            yield name, field.alias or key
