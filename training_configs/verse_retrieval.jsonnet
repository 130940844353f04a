// Given a verse in the King James Version, which is it in the World English Bible? The negatives of
// each verse are all others of a global batch of 2,048, encoded 64 at a time on each of two CPU
// workers. demo/prepare_verses.py prepares the data.

// With more dimensions the words that both translations share find nearly all verses by themselves.
local embedding_dim = 16;

{
  "dataset_reader": {
    "type": "text_pairs",
    "tokenizer": "whitespace",
    "token_indexers": {"tokens": "single_id"},
  },
  "train_data_path": "data/verses/pairs_train.jsonl",
  "validation_data_path": "data/verses/pairs_validation.jsonl",
  "datasets_for_vocab_creation": ["train"],
  "vocabulary": {"min_count": {"tokens": 2}},
  "model": {
    "type": "bi_encoder",
    "text_field_embedder": {
      "token_embedders": {"tokens": {"type": "embedding", "embedding_dim": embedding_dim}},
    },
    "seq2vec_encoder": {
      "type": "bag_of_embeddings",
      "embedding_dim": embedding_dim,
      "averaged": true,
    },
  },
  "data_loader": {"batch_size": 1024, "shuffle": true},
  "trainer": {
    "type": "deepspeed",
    "deepspeed_config": "zero_2",
    "grad_cache": {"chunk_size": 64},
    "optimizer": {"type": "adam", "lr": 0.005},
    "num_epochs": 10,
    "validation_metric": "+recall@1",
    "checkpointer": {"type": "deepspeed"},
  },
  "distributed": {"cuda_devices": [-1, -1]},
}
