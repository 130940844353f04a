"""
DeepSpeed configurations as they are pasted: the kinds that Hugging Face's Trainer, Lightning,
Accelerate and DeepSpeed's own examples come with. Each trains beside the classifier of the
fixtures.
"""

from typing import Any, Dict

_SIZES = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
_FP16 = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
_ADAMW = {
    "type": "AdamW",
    "params": {"lr": 3e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
}
_WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-3, "warmup_num_steps": 10},
}

PASTED: Dict[str, Dict[str, Any]] = {
    "hugging face, stage 2": {
        "fp16": _FP16,
        "bf16": {"enabled": "auto"},
        "optimizer": _ADAMW,
        "scheduler": _WARMUP,
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 2e8,
            "contiguous_gradients": True,
        },
        **_SIZES,
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    },
    "hugging face, stage 3": {
        "bf16": {"enabled": "auto"},
        "optimizer": _ADAMW,
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {**_WARMUP["params"], "total_num_steps": "auto"},
        },
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        **_SIZES,
    },
    "hugging face, offload": {
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "contiguous_gradients": True,
            "overlap_comm": True,
        },
        "optimizer": _ADAMW,
        **_SIZES,
    },
    "accelerate": {
        "zero_optimization": {
            "stage": 1,
            "offload_optimizer": {"device": "none"},
            "offload_param": {"device": "none"},
        },
        "gradient_clipping": 1.0,
        "steps_per_print": "auto",
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
    },
    "lightning, as it writes it": {
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 2,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 200000000,
            "reduce_bucket_size": 200000000,
            "sub_group_size": 1000000000000,
        },
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
            "synchronize_checkpoint_boundary": False,
        },
        "aio": {
            "block_size": 1048576,
            "queue_depth": 8,
            "single_submit": False,
            "overlap_events": True,
        },
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": 6,
        "gradient_clipping": 0.0,
    },
    "lightning, with its optimizer": {
        "optimizer": {"type": "Adam", "params": {"lr": 0.005, "weight_decay": 0}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 100, "warmup_num_steps": 4},
        },
        "zero_optimization": {"stage": 2},
    },
    "deepspeed, getting started": {
        "train_batch_size": 24,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
        "fp16": {"enabled": False},
        "zero_optimization": {"stage": 0},
    },
    "deepspeed, cifar": {
        "train_batch_size": 12,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": True},
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": 1,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    },
    "deepspeed, chat": {
        "train_micro_batch_size_per_gpu": 6,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "tensorboard": {"enabled": False, "output_path": "logs/", "job_name": "step1"},
    },
    "deepspeed, profiled": {
        "zero_optimization": {"stage": 2, "round_robin_gradients": False},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "scheduler": {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 5},
        },
        "comms_logger": {"enabled": True, "verbose": False, "prof_all": True},
        "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1},
        "csv_monitor": {"enabled": True, "job_name": "run"},
        "communication_data_type": "fp32",
    },
}
