"""The experiments of allennlp-models' fixtures, beside AllenNLP's own trainer."""
