// As finetune_llm.jsonnet, on conversations: the tokenizer's chat template has their form, and only
// what the assistant says is to be predicted.

(import "finetune_llm.jsonnet") + {
  "train_data_path": "data/translations/chat_train.jsonl",
  "validation_data_path": "data/translations/chat_validation.jsonl",
}
