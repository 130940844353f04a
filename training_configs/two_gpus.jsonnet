// Two GPUs, ZeRO-2, in bf16, or fp16 on GPUs without bf16.

(import "verse_classifier.jsonnet") + {
  "trainer"+: {
    "deepspeed_config": {
      "type": "zero_2",
      "bf16": {"enabled": "auto"},
      "fp16": {"enabled": "auto"},
    },
    "use_amp": true,
  },
  "distributed": {"cuda_devices": [0, 1]},
}
