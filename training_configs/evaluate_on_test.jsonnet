// Evaluates the best weights on the test set after training. With several workers this needs the
// train loop of this package, the top-level "type".

(import "verse_classifier.jsonnet") + {
  "type": "deepspeed",
  "test_data_path": "data/verses/test.jsonl",
  "evaluate_on_test": true,
}
