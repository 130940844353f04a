// Fine-tunes a language model with low-rank adapters: two CPU workers, ZeRO-2. Which one, a variable
// says: a name, a directory or a GGUF file.
//
//     export MODEL=HuggingFaceTB/SmolLM2-135M-Instruct
//
// The data are those of demo/prepare_translations.py, prompts with responses.

local model = std.extVar("MODEL");

local reader = {
  "type": "causal_lm",
  "tokenizer": model,
  "max_length": 128,
  // No loss for prompts.
  "loss_on": "responses",
};

{
  // Short examples after one another in sequences of 128 tokens.
  "dataset_reader": reader + {"pack": true},
  "validation_dataset_reader": reader,
  "train_data_path": "data/translations/train.jsonl",
  "validation_data_path": "data/translations/validation.jsonl",
  "vocabulary": {"type": "empty"},
  "model": {
    "type": "causal_lm",
    "model_name": model,
    "lora": {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
  },
  // Of each worker; 60 steps.
  "data_loader": {"batch_size": 2, "shuffle": true, "batches_per_epoch": 60},
  "validation_data_loader": {"batch_size": 16},
  "trainer": {
    "type": "deepspeed",
    "deepspeed_config": "zero_2",
    "optimizer": {"type": "adamw", "lr": 1e-3, "weight_decay": 0},
    "learning_rate_scheduler": {"type": "linear_with_warmup", "warmup_steps": 6},
    "grad_norm": 1.0,
    "num_epochs": 1,
    "validation_metric": "-perplexity",
    // The weights that adapters are trained beside can be had again.
    "checkpointer": {"exclude_frozen_parameters": true},
  },
  "distributed": {"cuda_devices": [-1, -1]},
}
