from itertools import groupby
from typing import Any, List, Tuple

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.common.util import JsonDict
from allennlp.data import DatasetReader
from allennlp.models import Model
from allennlp.predictors import Predictor
from typing_extensions import override

SIDES = ("query", "document")


@Predictor.register("text_embedder")
class TextEmbedderPredictor(Predictor):
    """
    Embeds texts with a `BiEncoder`. Takes `{"text": ...}`, `{"query": ...}` or `{"document": ...}`,
    and returns `{"embedding": [...], "text": ...}`.

    Registered as a `Predictor` with name "text_embedder".

    # Parameters

    model : `Model`, required.
        Takes batches with only queries or only documents, and returns their representations of
        shape `(batch_size, dim)` under the same name.
    dataset_reader : `DatasetReader`, required.
        A `TextPairsReader`, or another whose `text_to_instance` takes a `query` or a `document`.
    side : `str`, optional (default = `"query"`)
        Whether a `"text"` is a `"query"` or a `"document"`, and which of them is embedded if the
        input has both. On the command line: `--predictor-args '{"side": "document"}'`
    frozen : `bool`, optional (default = `True`)
        Whether to put the model into evaluation mode.

    # Raises

    `ConfigurationError`
        If `side` is another value, or if an input has no text.
    """

    def __init__(
        self, model: Model, dataset_reader: DatasetReader, side: str = "query", frozen: bool = True
    ) -> None:
        super().__init__(model, dataset_reader, frozen)
        if side not in SIDES:
            raise ConfigurationError(
                f'\'side\' of the predictor is {side!r}: write "query" or "document".'
            )
        self._side = side

    def embed(self, texts: List[str], side: str) -> torch.Tensor:
        """
        Embeds a batch of texts.

        # Parameters

        texts : `List[str]`
            One batch, of at least one text.
        side : `str`
            The kind of all texts: `"query"` or `"document"`.

        # Returns

        `torch.Tensor`
            Shape: `(num_texts, dim)`, on the CPU
        """
        instances = [self._dataset_reader.text_to_instance(**{side: text}) for text in texts]
        for instance in instances:
            self._dataset_reader.apply_token_indexers(instance)
        outputs = self._model.forward_on_instances(instances)
        return torch.stack([torch.from_numpy(output[side]) for output in outputs])

    @override
    def predict_json(self, inputs: JsonDict) -> JsonDict:
        return self.predict_batch_json([inputs])[0]

    @override
    def predict_batch_json(self, inputs: List[JsonDict]) -> List[JsonDict]:
        outputs = []
        # All instances of a batch have the same fields.
        for side, group in groupby(map(self._side_and_text, inputs), key=lambda pair: pair[0]):
            texts = [text for _, text in group]
            for text, embedding in zip(texts, self.embed(texts, side)):
                outputs.append({"embedding": embedding.tolist(), "text": text})
        return outputs

    def _side_and_text(self, inputs: JsonDict) -> Tuple[str, str]:
        if "text" in inputs:
            return self._side, get_text(inputs, "text")
        side = self._side
        if side not in inputs:
            (side,) = set(SIDES) - {side}
        return side, get_text(inputs, side)


def get_text(inputs: JsonDict, key: str) -> str:
    """
    Returns the text under a key of a predictor's input.

    # Raises

    `ConfigurationError`
        If the key has no text.
    """
    text: Any = inputs.get(key)
    if not isinstance(text, str) or not text.strip():
        raise ConfigurationError(
            f'The predictor got {inputs}: pass an object such as {{"{key}": "some text"}}.'
        )
    return text
