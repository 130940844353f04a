import hashlib
import os
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Union

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data import DatasetReader, Field, Instance, Token, TokenIndexer, Tokenizer
from allennlp.data.dataset_readers.dataset_reader import PathOrStr
from allennlp.data.fields import LabelField, ListField, TensorField, TextField
from allennlp.data.token_indexers import SingleIdTokenIndexer
from allennlp.data.tokenizers import SpacyTokenizer
from typing_extensions import override

from allennlp_deepspeed.text_files import PARQUET, Line, Row, read_rows

Id = Union[int, str]


@DatasetReader.register("text_pairs")
class TextPairsReader(DatasetReader):
    """
    Reads pairs of a query and a relevant document, and optionally hard negatives: documents that
    look relevant and aren't. A file of text is UTF-8 with one pair a line. The extension decides
    the format:

    * `.jsonl` or `.json`: JSON objects such as

          {"query": "how high is K2", "document": "K2 is 8611 m high.",
           "negatives": ["K2 is a boat.", "K2 was first climbed in 1954."],
           "query_id": 17, "document_id": "d4", "negative_ids": ["d9", "d2"]}

      in one line. Only `query` and `document` are required. Ids are integers or strings. Other keys
      are ignored.
    * `.tsv`: columns of the query, the document, and any number of negatives, without a header and
      without quoting.
    * `.parquet`, or a directory that `save_to_disk` of the package `datasets` has written: columns
      with the names of the JSON objects.

    Queries, or documents, with the same id are the same for the loss and the metric. So a relevant
    document of another pair doesn't count as a negative. If the file has no id, the id is a hash of
    the text. A file with `document_id` should have `negative_ids` too, because the loss can't tell
    without them that a negative is the document of another pair.

    Registered as a `DatasetReader` with name "text_pairs".

    # Parameters

    tokenizer : `Tokenizer`, optional (default = `SpacyTokenizer()`)
    token_indexers : `Dict[str, TokenIndexer]`, optional (default = `{"tokens": SingleIdTokenIndexer()}`)
    document_tokenizer : `Tokenizer`, optional (default = `None`)
        For documents and negatives. `None` means `tokenizer`.
    document_token_indexers : `Dict[str, TokenIndexer]`, optional (default = `None`)
        For documents and negatives. `None` means `token_indexers`.
    num_negatives : `int`, optional (default = `0`)
        The maximum number of negatives of a pair: its first ones are read. If it is above 0, all
        instances have the fields for negatives.
    max_query_tokens : `int`, optional (default = `None`)
        Truncates queries to this number of tokens of the tokenizer. For the tokenizer of a
        transformer, set its `max_length` instead, which preserves the special tokens.
    max_document_tokens : `int`, optional (default = `None`)
        The same for documents and negatives.
    prompts : `Dict[str, str]`, optional (default = `None`)
        Texts before each `"query"` and each `"document"`, negatives included, such as
        `{"query": "query: ", "document": "passage: "}`. As in sentence-transformers, a prompt is
        tokenized with its text as one text, and its tokens are pooled too. The archive has them, so
        that training, evaluation and prediction agree.

    # Raises

    `ConfigurationError`
        In the constructor, if a number is out of range or a prompt has another name. While reading, if the file has another
        extension, or if a row has another format: the error names the file, the number of the line
        or row, and the expected format.
    """  # noqa: E501

    def __init__(
        self,
        tokenizer: Tokenizer = None,
        token_indexers: Dict[str, TokenIndexer] = None,
        document_tokenizer: Tokenizer = None,
        document_token_indexers: Dict[str, TokenIndexer] = None,
        num_negatives: int = 0,
        max_query_tokens: int = None,
        max_document_tokens: int = None,
        prompts: Dict[str, str] = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            manual_distributed_sharding=True, manual_multiprocess_sharding=True, **kwargs
        )
        if num_negatives < 0:
            raise ConfigurationError(
                f"'num_negatives' of the reader is {num_negatives}: write the number of negatives "
                "per pair, 0 for none."
            )
        for key, limit in (
            ("max_query_tokens", max_query_tokens),
            ("max_document_tokens", max_document_tokens),
        ):
            if limit is not None and limit < 1:
                raise ConfigurationError(
                    f"'{key}' of the reader is {limit}: write a number of tokens of at least 1, "
                    "or remove the key for no limit."
                )
        self._prompts = {"query": "", "document": "", **(prompts or {})}
        if len(self._prompts) > 2:
            raise ConfigurationError(
                f"'prompts.{list(self._prompts)[2]}' of the reader is unknown: write a 'query', a "
                "'document' (which is for negatives too), or both."
            )
        self._tokenizer = tokenizer or SpacyTokenizer()
        self._token_indexers = token_indexers or {"tokens": SingleIdTokenIndexer()}
        self._document_tokenizer = document_tokenizer or self._tokenizer
        self._document_token_indexers = document_token_indexers or self._token_indexers
        self._num_negatives = num_negatives
        self._max_query_tokens = max_query_tokens
        self._max_document_tokens = max_document_tokens

    @override
    def _read(self, file_path: PathOrStr) -> Iterator[Instance]:
        suffix = PARQUET if os.path.isdir(file_path) else Path(file_path).suffix
        if suffix not in _PARSERS:
            raise ConfigurationError(
                f"The file '{file_path}' ends in '{suffix}', an unknown format: use a file that "
                f"ends in {', '.join(_PARSERS)}."
            )
        parse = _PARSERS[suffix]
        for row in self.shard_iterable(read_rows(file_path)):
            yield self.text_to_instance(**parse(row))

    @override
    def text_to_instance(
        self,
        query: str = None,
        document: str = None,
        negatives: List[str] = None,
        query_id: Id = None,
        document_id: Id = None,
        negative_ids: List[Id] = None,
    ) -> Instance:
        """
        Converts a pair, or one side of it, to an instance.

        # Parameters

        query : `str`, optional (default = `None`)
        document : `str`, optional (default = `None`)
        negatives : `List[str]`, optional (default = `None`)
        query_id : `Union[int, str]`, optional (default = `None`)
        document_id : `Union[int, str]`, optional (default = `None`)
        negative_ids : `List[Union[int, str]]`, optional (default = `None`)
            Of the same length as `negatives`.

        # Returns

        An `Instance` with the fields of the given arguments:

        query : `TextField`
        query_id : `LabelField`
            A nonzero integer. In a batch: int64 of shape `(batch_size,)`.
        document : `TextField`
        document_id : `LabelField`
            The same for documents.
        negatives : `ListField[TextField]`
            Only if the reader's `num_negatives` isn't 0. A pair without negatives has an empty
            text.
        negative_ids : `TensorField`
            Present with `negatives`. In a batch: int64 of shape `(batch_size, num_negatives)`,
            where `num_negatives` is the largest number of a pair in the batch. It is 0 exactly
            where there is no negative.
        """
        fields: Dict[str, Field] = {}
        if query is not None:
            tokens = self._tokenizer.tokenize(self._prompts["query"] + query)
            fields["query"] = TextField(tokens[: self._max_query_tokens])
            fields["query_id"] = _id_field(query, query_id)
        if document is not None:
            fields["document"] = self._document_field(document)
            fields["document_id"] = _id_field(document, document_id)
        if negatives is not None and self._num_negatives:
            negatives = negatives[: self._num_negatives]
            ids = [stable_hash(i) for i in (negative_ids or negatives)[: self._num_negatives]]
            texts: List[Field] = [self._document_field(negative) for negative in negatives]
            fields["negatives"] = ListField(texts or [TextField([])])
            fields["negative_ids"] = TensorField(torch.tensor(ids or [0]), padding_value=0)
        return Instance(fields)

    def _document_field(self, text: str) -> TextField:
        tokens: List[Token] = self._document_tokenizer.tokenize(self._prompts["document"] + text)
        return TextField(tokens[: self._max_document_tokens])

    @override
    def apply_token_indexers(self, instance: Instance) -> None:
        fields: Dict[str, Any] = instance.fields  # type: ignore[assignment]
        if "query" in fields:
            fields["query"].token_indexers = self._token_indexers
        if "document" in fields:
            fields["document"].token_indexers = self._document_token_indexers
        for negative in fields.get("negatives", []):
            negative.token_indexers = self._document_token_indexers


def stable_hash(value: Id) -> int:
    """
    Hashes an id.

    # Returns

    `int`
        Positive and below `2 ** 63`, the same in every process. Two values collide with probability
        `2 ** -63`. An integer has the hash of its decimal digits.
    """
    # A string from JSON can contain one half of a surrogate pair.
    content = str(value).encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1 or 1


def _id_field(text: str, given_id: Optional[Id]) -> LabelField:
    return LabelField(stable_hash(text if given_id is None else given_id), skip_indexing=True)


def _parse_record(row: Row) -> Dict[str, Any]:
    record = row.parse()
    arguments: Dict[str, Any] = {}
    for key in ("query", "document"):
        if key not in record:
            raise row.error(f"Expected the keys 'query' and 'document', but '{key}' is missing.")
        arguments[key] = row.check_text(record[key], f"'{key}'")
        arguments[f"{key}_id"] = _check_id(row, record.get(f"{key}_id"), f"'{key}_id'")
    negatives = _check_list(row, record, "negatives") or []
    arguments["negatives"] = [row.check_text(text, "each of 'negatives'") for text in negatives]
    negative_ids = _check_list(row, record, "negative_ids")
    if negative_ids is not None:
        if len(negative_ids) != len(negatives) or None in negative_ids:
            raise row.error(
                f"Expected {len(negatives)} 'negative_ids', one for each of 'negatives', but got "
                f"{negative_ids!r}."
            )
        arguments["negative_ids"] = [
            _check_id(row, negative_id, "each of 'negative_ids'") for negative_id in negative_ids
        ]
    return arguments


def _check_id(row: Row, value: Any, name: str) -> Optional[Id]:
    if value is not None and type(value) not in (int, str):  # a `bool` is an `int` too
        raise row.error(f"Expected {name} to be an integer or a string, and not {value!r}.")
    return value


def _check_list(row: Row, record: Dict[str, Any], key: str) -> Optional[List[Any]]:
    value = record.get(key)
    if value is not None and not isinstance(value, list):
        raise row.error(f"Expected '{key}' to be a list, and not {value!r}.")
    return value


def _parse_tsv(line: Line) -> Dict[str, Any]:
    columns = line.parse_tsv()
    if len(columns) < 2:
        raise line.error(
            "Expected a query, a document and optional negatives, separated by tabs, but found no "
            "tab."
        )
    query, document, *negatives = columns
    return {
        "query": line.check_text(query, "the query, the first column,"),
        "document": line.check_text(document, "the document, the second column,"),
        # Spreadsheet programs write the same number of columns in all lines.
        "negatives": [negative for negative in negatives if negative.strip()],
    }


_PARSERS: Dict[str, Callable[[Any], Dict[str, Any]]] = {
    ".jsonl": _parse_record,
    ".json": _parse_record,
    PARQUET: _parse_record,
    ".tsv": _parse_tsv,
}
