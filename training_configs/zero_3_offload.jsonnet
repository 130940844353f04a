// ZeRO-3 with optimizer states and parameters in CPU memory.

(import "verse_classifier.jsonnet") + {
  "type": "deepspeed",
  "trainer"+: {"deepspeed_config": "zero_3_offload"},
}
