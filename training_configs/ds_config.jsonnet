// A ds_config.json as it is, here one written for Hugging Face's Trainer. Each "auto" is filled
// from this side: the batch sizes, "use_amp" for the precision, "grad_norm" for the clipping.

(import "verse_classifier.jsonnet") + {
  "trainer"+: {
    "deepspeed_config": import "ds_config.json",
    "use_amp": true,
    "grad_norm": 1.0,
  },
}
