"""
Lists keys and registered names of AllenNLP 0.9 and 1 that AllenNLP 2 lacks, by the nearest section
above the key, and keys of other trainers, with what to write instead.
"""

from typing import Dict, List, Optional

_TOP_LEVEL = ""

_CALLBACKS = "write 'trainer.callbacks', with AllenNLP 2's `TrainerCallback`"
_TENSORBOARD = "\"tensorboard\" in 'trainer.callbacks'"
_MISMATCHED = '"pretrained_transformer_mismatched", with "model_name"'
_TRANSFORMER_KEYS = {
    "pretrained_model": 'write "model_name"',
    "model_name": f'write "type": {_MISMATCHED}',
}

_KEYS: Dict[str, Dict[str, str]] = {
    _TOP_LEVEL: {
        "iterator": "write 'data_loader'",
        "validation_iterator": "write 'validation_data_loader'",
        "cuda_device": "write 'trainer.cuda_device', or 'distributed.cuda_devices' for several "
        "workers",
        "vocabulary_params": "write 'vocabulary'",
        "reader": "write 'dataset_reader'",
        "dev_data_path": "write 'validation_data_path'",
        "include_package": "add --include-package to the command",
        **{name: f"write 'dataset_reader.{name}'" for name in ("tokenizer", "token_indexers")},
    },
    "distributed": {
        "master_address": "write 'distributed.primary_address'",
        "master_port": "write 'distributed.primary_port'",
    },
    "dataset_reader": {
        "lazy": "remove it (to read in each epoch: 'data_loader.max_instances_in_memory')",
        "cache_directory": "remove it",
    },
    "tokenizer": {
        **dict.fromkeys(
            ("word_splitter", "word_filter", "word_stemmer"), "remove it, or register a tokenizer"
        ),
        "model_name": 'write "type": "pretrained_transformer", too',
    },
    "token_indexers": {
        **_TRANSFORMER_KEYS,
        **dict.fromkeys(
            ("do_lowercase", "use_starting_offsets", "truncate_long_sequences"),
            "remove it (the model's tokenizer decides)",
        ),
        "max_pieces": 'write "max_length"',
    },
    "text_field_embedder": {
        "token_embedders": "write the embedders in it",
        **dict.fromkeys(
            ("allow_unmatched_keys", "embedder_to_indexer_map"),
            "remove it, and give each embedder the name of its indexer in 'token_indexers'",
        ),
    },
    "token_embedders": {
        **_TRANSFORMER_KEYS,
        "requires_grad": 'write "train_parameters" (of "embedding": "trainable")',
        "top_layer_only": 'write "last_layer_only"',
        "trainable": 'write "train_parameters"',
    },
    "trainer": {
        "num_serialized_models_to_keep": "write 'trainer.checkpointer.keep_most_recent_by_count'",
        "keep_serialized_model_every_num_seconds": "remove it, or write "
        "'trainer.checkpointer.keep_most_recent_by_age'",
        "model_save_interval": "write 'trainer.checkpointer.save_every_num_seconds'",
        "opt_level": 'write "bf16" or "fp16" in \'trainer.deepspeed_config\'',
        "shuffle": "write 'data_loader.shuffle'",
        **dict.fromkeys(("batch_callbacks", "epoch_callbacks", "end_callbacks"), _CALLBACKS),
        **dict.fromkeys(
            (
                "tensorboard_writer",
                "summary_interval",
                "histogram_interval",
                "should_log_learning_rate",
                "should_log_parameter_statistics",
                "log_batch_size_period",
            ),
            f"write {_TENSORBOARD}",
        ),
    },
    "optimizer": {
        "t_total": "remove it, and write 'trainer.learning_rate_scheduler'",
        "schedule": "remove it, and write 'trainer.learning_rate_scheduler'",
        "warmup": "remove it, and write 'trainer.learning_rate_scheduler.warmup_steps'",
        "max_grad_norm": "write 'trainer.grad_norm'",
        "infer_type_and_cast": "remove it",
        "params": "write its keys in 'trainer.optimizer'",
    },
    "learning_rate_scheduler": {
        "num_training_steps": "remove it (the trainer knows it)",
        "t_initial": 'Hugging Face\'s "cosine" is "cosine_with_warmup" here',
    },
    "checkpointer": {
        "num_serialized_models_to_keep": 'write "keep_most_recent_by_count"',
        "keep_serialized_model_every_num_seconds": 'remove it, or write "keep_most_recent_by_age"',
        "model_save_interval": 'write "save_every_num_seconds"',
    },
    "vocabulary": {
        "directory_path": 'write {"type": "from_files", "directory": ...}',
        "extend": 'write {"type": "extend", "directory": ...}',
    },
}
_LOADER = {
    "instances_per_epoch": 'write "batches_per_epoch", in batches of each worker',
    "cache_instances": "remove it (instances are cached unless 'max_instances_in_memory' is set)",
    "biggest_batch_first": "remove it",
    "sampler": 'write "shuffle", or "batch_sampler"',
    **dict.fromkeys(
        ("pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "track_epoch"),
        "remove it",
    ),
    "sorting_keys": 'write the names of fields, such as ["tokens"]',
}
_KEYS.update(data_loader=_LOADER, validation_data_loader=_LOADER)

# Of DeepSpeed, Hugging Face's Trainer and Lightning, in any section.
_ANYWHERE: Dict[str, str] = {
    "gradient_clipping": "write 'trainer.grad_norm'",
    "max_grad_norm": "write 'trainer.grad_norm'",
    "gradient_accumulation_steps": "write 'trainer.num_gradient_accumulation_steps'",
    "batch_size": "write 'data_loader.batch_size'",
    "train_micro_batch_size_per_gpu": "write 'data_loader.batch_size'",
    "per_device_train_batch_size": "write 'data_loader.batch_size'",
    **dict.fromkeys(
        ("eval_batch_size", "per_device_eval_batch_size"),
        "write 'validation_data_loader.batch_size'",
    ),
    "num_train_epochs": "write 'trainer.num_epochs'",
    "max_epochs": "write 'trainer.num_epochs'",
    "max_steps": "write 'data_loader.batches_per_epoch', in micro-batches, and 'num_epochs'",
    "parameter_groups": "write 'trainer.optimizer.parameter_groups' (here it had no effect)",
    "lr": "write 'trainer.optimizer.lr'",
    "learning_rate": "write 'trainer.optimizer.lr'",
    "weight_decay": "write 'trainer.optimizer.weight_decay'",
    "warmup_steps": "write 'trainer.learning_rate_scheduler.warmup_steps'",
    "save_steps": "write 'trainer.checkpointer.save_every_num_batches'",
    "every_n_epochs": "write 'trainer.checkpointer.save_completed_epochs'",
    "every_n_train_steps": "write 'trainer.checkpointer.save_every_num_batches'",
    "early_stopping_patience": "write 'trainer.patience'",
    "monitor": "write 'trainer.validation_metric', such as \"-loss\"",
    "save_total_limit": "write 'trainer.checkpointer.keep_most_recent_by_count'",
    "save_top_k": "write 'trainer.checkpointer.keep_best_by_count'",
    "logging_steps": "write 'trainer.log_every_num_steps'",
    "metric_for_best_model": "write 'trainer.validation_metric', such as \"+accuracy\"",
    "resume_from_checkpoint": "add --recover to the command, or write 'trainer.resume': \"auto\"",
    **dict.fromkeys(
        ("default_root_dir", "output_dir", "serialization_dir"), "add -s to the command"
    ),
    "overwrite_output_dir": "add --force to the command",
    "recover": "add --recover to the command",
    "fast_dev_run": "add --try to `allennlp deepspeed check`",
    "overfit_batches": "add --overfit to `allennlp deepspeed check`",
    "seed": "write 'random_seed', 'numpy_seed' and 'pytorch_seed' at the top level",
    "deepspeed": "write 'trainer.deepspeed_config'",
    "precision": "write 'trainer.use_amp': true, or \"bf16\" in 'trainer.deepspeed_config'",
    "accumulate_grad_batches": "write 'trainer.num_gradient_accumulation_steps'",
    "gradient_clip_val": "write 'trainer.grad_norm'",
    "optim": "write 'trainer.optimizer.type'",
    "adam_epsilon": "write 'trainer.optimizer.eps'",
    "lr_scheduler_type": "write 'trainer.learning_rate_scheduler'",
    "lr_scheduler_kwargs": "write 'trainer.learning_rate_scheduler'",
    "warmup_ratio": "write 'trainer.learning_rate_scheduler.warmup_steps'",
    "dataloader_num_workers": "write 'data_loader.num_workers'",
    "dataloader_drop_last": "write 'data_loader.drop_last'",
    "group_by_length": "write \"bucket\" in 'data_loader.batch_sampler'",
    "limit_train_batches": "write 'data_loader.batches_per_epoch', in micro-batches",
    **dict.fromkeys(
        ("check_val_every_n_epoch", "validation_interval"),
        'write {"type": "should_validate_callback", "validation_interval": ...} in '
        "'trainer.callbacks'",
    ),
    "limit_val_batches": "write 'validation_dataset_reader.max_instances'",
    "gradient_checkpointing": "write 'trainer.activation_checkpointing'",
    "report_to": 'write "wandb" or "tensorboard" in \'trainer.callbacks\'',
    **dict.fromkeys(("logger", "logging_dir"), f"write {_TENSORBOARD}"),
    "run_name": 'write "name" of "wandb" in \'trainer.callbacks\'',
    "save_strategy": "write 'trainer.checkpointer.save_every_num_batches'",
    "num_nodes": "write 'distributed.num_nodes'",
    "ddp_timeout": "write 'distributed.timeout'",
    "label_smoothing_factor": "remove it (the model computes the loss)",
    **dict.fromkeys(("adam_beta1", "adam_beta2"), "write 'trainer.optimizer.betas'"),
    **dict.fromkeys(
        ("accelerator", "cuda_devices", "devices", "gpus", "no_cuda", "use_cpu"),
        "write 'distributed.cuda_devices', such as [0, 1], or 'trainer.cuda_device'",
    ),
    **dict.fromkeys(
        ("eval_steps", "eval_strategy", "evaluation_strategy", "val_check_interval"),
        "remove it to validate after each epoch, or write 'trainer.validate_every_num_batches', "
        "in optimizer steps",
    ),
    **dict.fromkeys(
        ("fsdp", "fsdp_config", "strategy"),
        'write \'trainer.deepspeed_config\', such as "zero_2" or "zero_3"',
    ),
    "enable_checkpointing": "write 'trainer.checkpointer': null for no checkpoints, or remove it",
    "torch_dtype": 'write "bf16" or "fp16" in \'trainer.deepspeed_config\'',
    "freeze": "write 'trainer.no_grad'",
    "num_labels": "remove it (the vocabulary counts the labels)",
    "ddp_find_unused_parameters": 'write {"type": "torch", "find_unused_parameters": true} as '
    "'distributed.ddp_accelerator'",
    "gradient_checkpointing_kwargs": "write 'trainer.activation_checkpointing'",
    "optim_args": "write the arguments in 'trainer.optimizer'",
    "adafactor": "write \"huggingface_adafactor\" as 'trainer.optimizer.type'",
    **dict.fromkeys(
        (
            *("auto_find_batch_size", "dataloader_pin_memory", "ddp_backend", "do_eval"),
            *("do_train", "eval_on_start", "greater_is_better", "half_precision_backend"),
            *("label_names", "length_column_name", "load_best_model_at_end", "logging_strategy"),
            *("logging_first_step", "neftune_noise_alpha", "push_to_hub", "tf32"),
            *("remove_unused_columns", "torch_empty_cache_steps"),
            *("benchmark", "deterministic", "enable_model_summary"),
            *("enable_progress_bar", "local_rank", "min_epochs", "num_sanity_val_steps"),
            *("sync_batchnorm", "world_size"),
        ),
        "remove it",
    ),
}

_REGEXES = 'write {"regexes": [...]}'
_LISTS = {"initializer": _REGEXES, "regularizer": _REGEXES}

_TYPES: Dict[str, Dict[str, str]] = {
    "tokenizer": {
        "word": '"spacy"',
        "AutoTokenizer": '"pretrained_transformer", with "model_name"',
    },
    "token_indexers": {
        "bert-pretrained": _MISMATCHED,
        "pos_tag": '"single_id" with "feature_name": "tag_"',
        "dependency_label": '"single_id" with "feature_name": "dep_"',
        "ner_tag": '"single_id" with "feature_name": "ent_type_"',
    },
    "token_embedders": {"bert-pretrained": _MISMATCHED},
    "trainer": {"callback": '"deepspeed"', "default": '"deepspeed"'},
    "learning_rate_scheduler": dict.fromkeys(
        ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"),
        "it in 'trainer.deepspeed_config.scheduler', without 'trainer.learning_rate_scheduler'",
    ),
    "moving_average": {"ema": '"exponential"'},
    "callbacks": {
        **dict.fromkeys(("early_stopping", "earlystopping"), "'trainer.patience'"),
        **dict.fromkeys(("model_checkpoint", "modelcheckpoint"), "'trainer.checkpointer'"),
        **dict.fromkeys(
            ("learning_rate_monitor", "learningratemonitor", "lr_monitor", "progress_bar"),
            "nothing (metrics.jsonl and the console have it)",
        ),
        **dict.fromkeys(("stochasticweightaveraging", "swa", "ema"), "'trainer.moving_average'"),
        "log_to_tensorboard": _TENSORBOARD,
        **dict.fromkeys(
            ("validate", "checkpoint", "track_metrics", "update_learning_rate"),
            "the trainer's own keys, without this callback",
        ),
    },
    "optimizer": {"bert_adam": '"huggingface_adamw"'},
    "data_loader": {"pytorch_dataloader": '"multiprocess"', "default": '"multiprocess"'},
}


def replacement(path: str) -> Optional[str]:
    """
    Returns what to write for a key of AllenNLP 0.9 or 1, `None` if it isn't one. The `path` is the
    whole path of the key.
    """
    *sections, name = path.split(".")
    return _in_nearest(_KEYS, sections, name)


def advice(path: str) -> Optional[str]:
    """The same for a key of any other trainer."""
    found = replacement(path) or _ANYWHERE.get(path.split(".")[-1])
    return None if found is not None and f"'{path}'" in found else found


def replacement_of_list(path: str) -> Optional[str]:
    """Returns what to write instead of a list at this path, `None` if it was never a list."""
    return _LISTS.get(path.split(".")[-1])


def replacement_of_type(path: str, name: str) -> Optional[str]:
    """The same for the registered name of a section, or of a callback of another trainer."""
    sections = path.removesuffix(".type").split(".")
    of_others = name.lower().removesuffix("callback").strip("_")
    instead = _in_nearest(_TYPES, sections, name) or _in_nearest(_TYPES, sections, of_others)
    return None if instead is None else f"write {instead}"


def _in_nearest(table: Dict[str, Dict[str, str]], sections: List[str], name: str) -> Optional[str]:
    for section in reversed(sections or [_TOP_LEVEL]):
        if name in table.get(section, {}):
            return table[section][name]
    return None
