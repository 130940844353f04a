from pathlib import Path
from typing import Callable, Dict, List, Optional, Tuple

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.common.tqdm import Tqdm
from allennlp.common.util import JsonDict, lazy_groups_of
from allennlp.data import DatasetReader
from allennlp.models import Model
from allennlp.predictors import Predictor
from overrides import overrides

from allennlp_deepspeed.contrastive.text_embedder import TextEmbedderPredictor, checked_text
from allennlp_deepspeed.text_files import Line, read_lines


@Predictor.register("text_search")
class TextSearchPredictor(Predictor):
    """
    Finds the documents for a query with a `BiEncoder`, among those of a file. Takes
    `{"query": ...}` and gives

        {"query": ..., "documents": [{"document": ..., "score": ..., "line": ...}, ...]}

    with the best first. `score` is the dot product of the representations, `line` the number of the
    document's line in the file, from 1 on. Documents with the same score are in the order of the
    file, and a document that is there more than once is found once, at its first line.

    The file is embedded when the first query comes, and its representations are kept in the host's
    memory: 4 bytes for each of their dimensions.

    Registered as a `Predictor` with name "text_search".

    # Parameters

    model : `Model`, required.
        As for `TextEmbedderPredictor`.
    dataset_reader : `DatasetReader`, required.
        As for `TextEmbedderPredictor`.
    documents : `str`, required.
        A file in UTF-8 with a document a line, whose ending says in which format: `.jsonl` or
        `.json` with objects that have a `"document"` or else a `"text"`; `.tsv` with the document
        in the second column, after a query or an id, or in the only one; `.txt` with nothing but
        the text. On the command line: `--predictor-args '{"documents": "passages.jsonl"}'`
    k : `int`, optional (default = `10`)
        How many documents to give for a query, at most.
    batch_size : `int`, optional (default = `32`)
        How many documents are embedded at a time.
    frozen : `bool`, optional (default = `True`)
        Whether to put the model into evaluation mode.

    # Raises

    `ConfigurationError`
        When it is constructed, if there is no `documents`, if that file has another ending, or if
        a number is below 1. With the first query, if the file has a line without a document, or
        none with one.
    """

    def __init__(
        self,
        model: Model,
        dataset_reader: DatasetReader,
        documents: str = None,
        k: int = 10,
        batch_size: int = 32,
        frozen: bool = True,
    ) -> None:
        super().__init__(model, dataset_reader, frozen)
        if documents is None or Path(documents).suffix not in _PARSERS:
            raise ConfigurationError(
                f"'documents' of the predictor is {documents!r}. Give a file that ends in "
                f"{', '.join(_PARSERS)}: "
                '--predictor-args \'{"documents": "passages.jsonl"}\' on the command line.'
            )
        for key, value in (("k", k), ("batch_size", batch_size)):
            if type(value) is not int or value < 1:
                raise ConfigurationError(
                    f"'{key}' of the predictor is {value!r}. Give an integer that is at least 1."
                )
        self._embedder = TextEmbedderPredictor(model, dataset_reader, frozen=frozen)
        self._file_path = documents
        self._k = k
        self._batch_size = batch_size
        self._documents: List[Tuple[str, int]] = []  # with the number of the line
        self._embeddings: Optional[torch.Tensor] = None  # shape: (num_documents, dim)

    @overrides
    def predict_json(self, inputs: JsonDict) -> JsonDict:
        return self.predict_batch_json([inputs])[0]

    @overrides
    def predict_batch_json(self, inputs: List[JsonDict]) -> List[JsonDict]:
        queries = [checked_text(json_dict, "query") for json_dict in inputs]
        if self._embeddings is None:
            self._documents = self._read_documents()
            self._embeddings = self._embed_documents()
        # Shape: (num_queries, num_documents)
        scores = self._embedder.embed(queries, "query") @ self._embeddings.T
        scores, indices = scores.sort(dim=1, descending=True, stable=True)
        best = zip(scores[:, : self._k].tolist(), indices[:, : self._k].tolist())
        return [
            {"query": query, "documents": [self._found(i, score) for score, i in zip(*found)]}
            for query, found in zip(queries, best)
        ]

    def _found(self, index: int, score: float) -> JsonDict:
        document, line = self._documents[index]
        return {"document": document, "score": score, "line": line}

    def _read_documents(self) -> List[Tuple[str, int]]:
        parse = _PARSERS[Path(self._file_path).suffix]
        lines: Dict[str, int] = {}
        for line in read_lines(self._file_path):
            lines.setdefault(line.check_text(parse(line), "the document"), line.number)
        if not lines:
            raise ConfigurationError(
                f"The file '{self._file_path}', which is 'documents' of the predictor, is empty."
            )
        return list(lines.items())

    def _embed_documents(self) -> torch.Tensor:
        texts = Tqdm.tqdm([text for text, _ in self._documents], desc="embedding documents")
        batches = lazy_groups_of(texts, self._batch_size)
        return torch.cat([self._embedder.embed(batch, "document") for batch in batches])


def _parse_json(line: Line) -> str:
    record = line.parse_json()
    for key in ("document", "text"):
        if key in record:
            return record[key]
    raise line.error("Expected the key 'document' or 'text'.")


def _parse_tsv(line: Line) -> str:
    return line.parse_tsv()[:2][-1]


_PARSERS: Dict[str, Callable[[Line], str]] = {
    ".jsonl": _parse_json,
    ".json": _parse_json,
    ".tsv": _parse_tsv,
    ".txt": Line.parse_text,
}
