"""
Lists DeepSpeed's keys that can't work in an AllenNLP trainer.
"""

from typing import Any, Dict, Tuple

# Keys to remove, with the values that disable them.
_TO_REMOVE: Dict[str, Tuple[Any, ...]] = {
    "data_parallel_size": (),
    "expert_parallel": ({},),
    "hybrid_engine": ({},),
    "autotuning": ({},),
    "data_efficiency": ({},),
    "datastates_ckpt": (),
    "disable_allgather": (False,),
    "disable_python_gc": (False,),
    "gradient_allreduce_op": ("mean",),
    "gradient_predivide_factor": (1,),
    "prescale_gradients": (False,),
    "seq_parallel_communication_data_type": (),
    "use_data_before_expert_parallelism": (False,),
    "weight_quantization": ({}, {"enabled": False}),
    "timers.throughput.synchronized": (True,),
    "checkpoint.load_universal": (False,),
    "checkpoint.writer.decoupled": (False,),
    "activation_checkpointing.partition_activations": (False,),
    "activation_checkpointing.contiguous_memory_optimization": (False,),
    "activation_checkpointing.number_checkpoints": (None,),
    # DeepSpeed confuses the fp32 weights of parameters with it.
    "zero_optimization.round_robin_gradients": (False,),
    "zero_optimization.elastic_checkpoint": (False,),
    "zero_optimization.allgather_partitions": (True,),
    "zero_optimization.ignore_unused_parameters": (True,),
    "zero_optimization.legacy_stage1": (False,),
    "zero_optimization.load_from_fp32_weights": (True,),
    "zero_optimization.override_module_apply": (True,),
    "zero_optimization.parameter_alignment": (False,),
    "zero_optimization.pipeline_loading_checkpoint": (False,),
    # It updates parts of the weights later than the schedule and checkpoints assume.
    "zero_optimization.zenflow": (),
    # They step in another process or by another optimizer, whose states aren't saved.
    "zero_optimization.offload_optimizer.super_offload": (False,),
    "zero_optimization.offload_optimizer.ratio": (1,),
    # These are for GPUs, and aren't tested here.
    "zero_optimization.zero_quantized_gradients": (False,),
    "zero_optimization.zero_quantized_nontrainable_weights": (False,),
    "zero_optimization.zero_quantized_weights": (False,),
}

# Keys with a replacement.
_INSTEAD: Dict[str, Tuple[Tuple[Any, ...], str]] = {
    "pipeline": ((), "use ZeRO stage 3"),
    "tensor_parallel": (({},), "use ZeRO stage 3"),
    "sequence_parallel_size": ((1,), "write 'trainer.sequence_parallel_size' instead"),
    "bfloat16": ((), 'write "bf16", the new name'),
    "zero_optimization.cpu_offload": (
        (),
        'write "offload_optimizer": {"device": "cpu"}, or remove it',
    ),
    "zero_optimization.cpu_offload_param": (
        (),
        'write "offload_param": {"device": "cpu"}, or remove it',
    ),
    "zero_optimization.cpu_offload_use_pin_memory": (
        (),
        'write "pin_memory" in "offload_optimizer" or "offload_param"',
    ),
    "zero_optimization.stage3_module_granularity_threshold": (
        (0,),
        'name the modules to gather as one in "leaf_module"',
    ),
    "flops_profiler.enabled": ((False,), 'use the callback "profiler"'),
    "dataloader_drop_last": ((False,), "write 'data_loader.drop_last'"),
    "managed_gradient_accumulation": ((), "use 'trainer.num_gradient_accumulation_steps'"),
    "compile": (
        ({}, {"deepcompile": False}),
        "remove it, and write \"torch_compile\": true in 'trainer'",
    ),
}

UNSUPPORTED: Dict[str, Tuple[Tuple[Any, ...], str]] = {
    **{path: (accepted, "remove it") for path, accepted in _TO_REMOVE.items()},
    **_INSTEAD,
}
"""By path, the values that disable a key, and advice for any other value."""
