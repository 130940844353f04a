// ZeRO-2 in bf16: the weights that the model computes with are bf16, the optimizer steps fp32
// master weights. Needs a GPU that computes in bf16, or a CPU.

(import "verse_classifier.jsonnet") + {
  "trainer"+: {
    "deepspeed_config": {"type": "zero_2", "bf16": {"enabled": true}},
  },
}
