"""
Lists the keys of DeepSpeed's that can't work in an AllenNLP trainer, each with the reason.
"""

from typing import Any, Dict, Tuple

_QUANTIZED = (
    "what crosses the network is rounded, by kernels for GPUs that aren't tested here; remove the "
    "key"
)

# What can't work inside an AllenNLP trainer: the key, the values that leave it turned off, and why
# no other will do.
UNSUPPORTED: Dict[str, Tuple[Tuple[Any, ...], str]] = {
    "pipeline": ((), "an AllenNLP model is no sequence of pipeline stages; use ZeRO stage 3"),
    "tensor_parallel": (({},), "its workers read different instances; use ZeRO stage 3"),
    "sequence_parallel_size": ((1,), "it is a key of the trainer; write it there"),
    "data_parallel_size": ((), 'it is the length of "distributed.cuda_devices"; remove the key'),
    "expert_parallel": (({},), "its modules don't fit an archive; remove the section"),
    "hybrid_engine": (({},), "its modules don't fit an archive; remove the section"),
    "autotuning": (({},), "it drives DeepSpeed's own launcher; remove the section"),
    "data_efficiency": (
        ({},),
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
    "bfloat16": ((), 'DeepSpeed has renamed it; write "bf16"'),
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
    "zero_optimization.cpu_offload": (
        (),
        'DeepSpeed has renamed it; write "offload_optimizer": {"device": "cpu"}, or remove the key',
    ),
    "zero_optimization.cpu_offload_param": (
        (),
        'DeepSpeed has renamed it; write "offload_param": {"device": "cpu"}, or remove the key',
    ),
    "zero_optimization.cpu_offload_use_pin_memory": (
        (),
        'DeepSpeed has renamed it; write "pin_memory" in the section that offloads',
    ),
    "zero_optimization.elastic_checkpoint": (
        (False,),
        "neither recovery nor `allennlp deepspeed export` reads its checkpoints, and those without "
        "it are converted for any number of workers by `allennlp train --recover`; remove the key",
    ),
    "flops_profiler.enabled": (
        (False,),
        "DeepSpeed begins the time of the whole model in 1970, counts no parameters that stage 3 "
        "has sharded and fails on packed sequences; remove the section, and use the callback "
        '"profiler"',
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
