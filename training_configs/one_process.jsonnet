// One process on the first GPU, or on the CPU where there is none: no "distributed".

(import "verse_classifier.jsonnet") + {
  "distributed": null,
}
