"""
Lists keys and registered names of AllenNLP 0.9 and 1 that AllenNLP 2 lacks, and what to write
instead, by the nearest section above the key.
"""

from typing import Dict, List, Optional

_TOP_LEVEL = ""

_CALLBACKS = "write 'trainer.callbacks', with AllenNLP 2's `TrainerCallback`"
_TENSORBOARD = "\"tensorboard\" in 'trainer.callbacks'"
_MISMATCHED = '"pretrained_transformer_mismatched", with "model_name"'
_TRANSFORMER_KEYS = {"pretrained_model": 'write "model_name"'}

_KEYS: Dict[str, Dict[str, str]] = {
    _TOP_LEVEL: {
        "iterator": "write 'data_loader'",
        "validation_iterator": "write 'validation_data_loader'",
        "cuda_device": "write 'trainer.cuda_device', or 'distributed.cuda_devices' for several "
        "workers",
        "vocabulary_params": "write 'vocabulary'",
    },
    "distributed": {
        "master_address": "write 'distributed.primary_address'",
        "master_port": "write 'distributed.primary_port'",
    },
    "dataset_reader": {
        "lazy": "remove it (to read in each epoch: 'data_loader.max_instances_in_memory')",
        "cache_directory": "remove it",
    },
    "tokenizer": dict.fromkeys(
        ("word_splitter", "word_filter", "word_stemmer"), "remove it, or register a tokenizer"
    ),
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

_REGEXES = 'write {"regexes": [...]}'
_LISTS = {"initializer": _REGEXES, "regularizer": _REGEXES}

_TYPES: Dict[str, Dict[str, str]] = {
    "tokenizer": {"word": '"spacy"'},
    "token_indexers": {
        "bert-pretrained": _MISMATCHED,
        "pos_tag": '"single_id" with "feature_name": "tag_"',
        "dependency_label": '"single_id" with "feature_name": "dep_"',
        "ner_tag": '"single_id" with "feature_name": "ent_type_"',
    },
    "token_embedders": {"bert-pretrained": _MISMATCHED},
    "trainer": {"callback": '"deepspeed"', "default": '"deepspeed"'},
    "callbacks": {
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


def replacement_of_list(path: str) -> Optional[str]:
    """Returns what to write instead of a list at this path, `None` if it was never a list."""
    return _LISTS.get(path.split(".")[-1])


def replacement_of_type(path: str, name: str) -> Optional[str]:
    """The same for the registered name of a section, `None` if it isn't one of AllenNLP 1."""
    instead = _in_nearest(_TYPES, path.removesuffix(".type").split("."), name)
    return None if instead is None else f"a name of AllenNLP 1; write {instead}"


def _in_nearest(table: Dict[str, Dict[str, str]], sections: List[str], name: str) -> Optional[str]:
    for section in reversed(sections or [_TOP_LEVEL]):
        if name in table.get(section, {}):
            return table[section][name]
    return None
