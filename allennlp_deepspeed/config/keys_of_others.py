"""
Says what to write here for keys of other trainers: DeepSpeed, Hugging Face's Trainer and Lightning.
"""

from typing import Optional

from allennlp_deepspeed.config.schema_validation import find_key_paths

_MAX_LENGTH = 150

_INSTEAD = {
    "gradient_clipping": "write 'trainer.grad_norm'",
    "max_grad_norm": "write 'trainer.grad_norm'",
    "gradient_accumulation_steps": "write 'trainer.num_gradient_accumulation_steps'",
    "batch_size": "write 'data_loader.batch_size'",
    "train_micro_batch_size_per_gpu": "write 'data_loader.batch_size'",
    "per_device_train_batch_size": "write 'data_loader.batch_size'",
    "per_device_eval_batch_size": "write 'validation_data_loader.batch_size'",
    "num_train_epochs": "write 'trainer.num_epochs'",
    "max_epochs": "write 'trainer.num_epochs'",
    "max_steps": "write 'data_loader.batches_per_epoch', in micro-batches, and 'num_epochs'",
    "parameter_groups": "write 'trainer.optimizer.parameter_groups' (here it had no effect)",
    "lr": "write 'trainer.optimizer.lr'",
    "learning_rate": "write 'trainer.optimizer.lr'",
    "weight_decay": "write 'trainer.optimizer.weight_decay'",
    "warmup_steps": "write 'trainer.learning_rate_scheduler.warmup_steps'",
    "save_steps": "write 'trainer.checkpointer.save_every_num_batches'",
    "save_total_limit": "write 'trainer.checkpointer.keep_most_recent_by_count'",
    "logging_steps": "write 'trainer.log_every_num_steps'",
    "metric_for_best_model": "write 'trainer.validation_metric', such as \"+accuracy\"",
    "resume_from_checkpoint": "add --recover to the command, or write 'trainer.resume': \"auto\"",
    "output_dir": "add -s to the command",
    "seed": "write 'random_seed', 'numpy_seed' and 'pytorch_seed' at the top level",
    "deepspeed": "write 'trainer.deepspeed_config'",
    "precision": "write 'trainer.use_amp': true, or \"bf16\" in 'trainer.deepspeed_config'",
}

# Keys for which there is no single one here.
_OTHERS = {
    "accelerator",
    "accumulate_grad_batches",
    "adafactor",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "auto_find_batch_size",
    "check_val_every_n_epoch",
    "dataloader_drop_last",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "ddp_backend",
    "ddp_find_unused_parameters",
    "ddp_timeout",
    "devices",
    "do_eval",
    "do_train",
    "eval_on_start",
    "eval_steps",
    "eval_strategy",
    "evaluation_strategy",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
    "gradient_clip_val",
    "greater_is_better",
    "group_by_length",
    "half_precision_backend",
    "label_names",
    "label_smoothing_factor",
    "length_column_name",
    "limit_train_batches",
    "load_best_model_at_end",
    "logging_dir",
    "logging_first_step",
    "logging_strategy",
    "lr_scheduler_kwargs",
    "lr_scheduler_type",
    "neftune_noise_alpha",
    "num_nodes",
    "optim",
    "optim_args",
    "push_to_hub",
    "remove_unused_columns",
    "report_to",
    "run_name",
    "save_strategy",
    "strategy",
    "tf32",
    "torch_empty_cache_steps",
    "val_check_interval",
    "warmup_ratio",
}


def advice(name: str) -> Optional[str]:
    """Returns what to write for a key of another trainer, `None` if it isn't one."""
    if name in _INSTEAD:
        return _INSTEAD[name]
    if name in _OTHERS:
        return "see docs/moving_from_other_trainers.md"
    places = " or ".join(f"'trainer.deepspeed_config.{path}'" for path in find_key_paths(name))
    return f"write {places}" if places and len(places) < _MAX_LENGTH else None
