// DeepSpeed's own optimizer and learning rate schedule, from its sections "optimizer" and
// "scheduler" instead of AllenNLP's keys.

(import "verse_classifier.jsonnet") + {
  "trainer"+: {
    "optimizer": null,
    "deepspeed_config": {
      "type": "zero_2",
      // Without "torch_adam" it is DeepSpeed's operator, which is compiled at first use.
      "optimizer": {
        "type": "AdamW",
        "params": {"lr": 0.005, "weight_decay": 0.01, "torch_adam": true},
      },
      // "auto" is filled from the trainer: optimizer steps in all epochs, the optimizer's "lr".
      "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 100},
      },
    },
  },
}
