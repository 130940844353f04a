// Four micro-batches of 32 on each of two workers make an optimizer step on 256 instances, with the
// gradient's norm clipped and the learning rate changed at each step.

(import "verse_classifier.jsonnet") + {
  "data_loader"+: {"batch_size": 32},
  "trainer"+: {
    "num_gradient_accumulation_steps": 4,
    "grad_norm": 1.0,
    "learning_rate_scheduler": {"type": "slanted_triangular"},
  },
}
