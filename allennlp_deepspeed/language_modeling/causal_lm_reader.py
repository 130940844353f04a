from typing import Any, Iterator, List, Optional

import torch
from allennlp.data import DatasetReader, Instance
from allennlp.data.dataset_readers.dataset_reader import PathOrStr
from allennlp.data.fields import TensorField
from overrides import overrides
from transformers import AutoTokenizer

from allennlp_deepspeed.language_modeling.chunked_cross_entropy import IGNORED


@DatasetReader.register("causal_lm")
class CausalLMReader(DatasetReader):
    """
    Registered as a `DatasetReader` with name "causal_lm".
    """

    def __init__(self, tokenizer: str, max_length: Optional[int] = None, **kwargs: Any) -> None:
        super().__init__(
            manual_distributed_sharding=True, manual_multiprocess_sharding=True, **kwargs
        )
        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self._max_length = max_length

    @overrides
    def _read(self, file_path: PathOrStr) -> Iterator[Instance]:
        import json

        with open(file_path) as file:
            for line in self.shard_iterable(file):
                yield self.text_to_instance(json.loads(line)["text"])

    @overrides(check_signature=False)
    def text_to_instance(self, text: str) -> Instance:
        ids: List[int] = self._tokenizer(text)["input_ids"][: self._max_length]
        input_ids = torch.tensor(ids)
        labels = input_ids.clone()
        labels[0] = IGNORED
        pad_id = self._tokenizer.pad_token_id or 0
        return Instance(
            {
                "input_ids": TensorField(input_ids, padding_value=pad_id),
                "labels": TensorField(labels, padding_value=IGNORED),
            }
        )
