// Which of ten parts of the Bible is a verse from? AllenNLP's own reader and model, trained with
// ZeRO-2 on two CPU workers. `make demo` prepares the data (demo/prepare_verses.py) and runs this.

local embedding_dim = 128;

{
  "dataset_reader": {
    "type": "text_classification_json",
    // The key that the `text_classifier` predictor reads too, so that `allennlp predict` takes the
    // same files as `allennlp evaluate`.
    "text_key": "sentence",
    "tokenizer": "whitespace",
    "token_indexers": {"tokens": "single_id"},
  },
  "train_data_path": "data/verses/train.jsonl",
  "validation_data_path": "data/verses/validation.jsonl",
  "vocabulary": {"min_count": {"tokens": 2}},
  "model": {
    "type": "basic_classifier",
    "text_field_embedder": {
      "token_embedders": {"tokens": {"type": "embedding", "embedding_dim": embedding_dim}},
    },
    "seq2vec_encoder": {
      "type": "bag_of_embeddings",
      "embedding_dim": embedding_dim,
      "averaged": true,
    },
    "dropout": 0.5,
  },
  "data_loader": {"batch_size": 128, "shuffle": true},
  "trainer": {
    "type": "deepspeed",
    "deepspeed_config": "zero_2",
    "optimizer": {"type": "adam", "lr": 0.005},
    "num_epochs": 5,
    "validation_metric": "+accuracy",
    "checkpointer": {"type": "deepspeed"},
  },
  "distributed": {"cuda_devices": [-1, -1]},
}
