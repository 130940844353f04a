// ZeRO-3: parameters are partitioned too, from the construction of the model on.

(import "verse_classifier.jsonnet") + {
  "type": "deepspeed",
  "trainer"+: {
    "deepspeed_config": {
      "type": "zero_3",
      "zero_optimization": {
        // Parameters with fewer elements than this stay whole on every rank (DeepSpeed's default is
        // 100,000). This model is so small that only its embedding is above.
        "stage3_param_persistence_threshold": 10000,
      },
    },
  },
}
