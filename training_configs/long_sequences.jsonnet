// As finetune_llm.jsonnet, on sequences of which each of two workers computes a half. The model's
// heads have to be an even number; SmolLM2-135M has 9, for three workers.

local workers = 2;

(import "finetune_llm.jsonnet") + {
  "train_data_path": "data/translations/chapters_train.jsonl",
  "validation_data_path": "data/translations/chapters_validation.jsonl",
  "dataset_reader"+: {"max_length": 2048, "loss_on": "all"},
  "validation_dataset_reader"+: {"max_length": 2048, "loss_on": "all"},
  // Both are of the workers together.
  "data_loader": {"batch_size": 1, "shuffle": true, "batches_per_epoch": 20},
  "validation_data_loader": {"batch_size": 1},
  "trainer"+: {
    "deepspeed_config": "zero_3",
    "sequence_parallel_size": workers,
    // Of layers only the inputs are kept, and their feed-forward parts compute a quarter of the
    // positions at a time.
    "activation_checkpointing": [@"layers\.\d+$"],
    "sequence_tiling": {"modules": ["mlp$"], "num_tiles": 4},
  },
  "distributed": {"cuda_devices": std.repeat([-1], workers)},
}
