import inspect
import json
import logging
from itertools import islice
from typing import Any, Dict, List, Optional

import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.common.util import JsonDict
from allennlp.training.callbacks import TensorBoardCallback, TrainerCallback
from typing_extensions import override

from allennlp_deepspeed.announcements import announce
from allennlp_deepspeed.models.language_modeling.causal_lm import CausalLM
from allennlp_deepspeed.models.language_modeling.causal_lm_predictor import CausalLMPredictor
from allennlp_deepspeed.models.language_modeling.causal_lm_reader import CausalLMReader
from allennlp_deepspeed.models.language_modeling.example_sizes import ModelLimits
from allennlp_deepspeed.text_files import Row, read_rows

logger = logging.getLogger(__name__)

NAME = "log_completions"

_MAX_NEW_TOKENS = 64


@TrainerCallback.register(NAME)
class LogCompletionsCallback(TrainerCallback):
    """
    Generates responses to the first prompts of the validation data after each validation, with the
    weights of the validation. They are on the console and in the log of rank 0, in
    `metrics.jsonl`, from which `allennlp deepspeed report` shows them, and in TensorBoard if there
    is the callback "tensorboard". Training isn't changed: random states and modules are as without
    it.

    Every rank generates the same responses. At ZeRO stage 3 parameters are gathered once for all of
    them if there is memory, as in validation.

    Registered as a `TrainerCallback` with name "log_completions":

    ```jsonnet
    "callbacks": [{"type": "log_completions", "num_prompts": 2, "predictor_args": {"stop": ["\\n"]}}]
    ```

    # Parameters

    serialization_dir : `str`
        Passed in by the trainer.
    num_prompts : `int`, optional (default = `4`)
        The number of prompts: all are one batch.
    predictor_args : `Dict[str, Any]`, optional (default = `None`)
        Keys of the predictor "causal_lm". `max_new_tokens` is 64 if unset.

    # Raises

    `ConfigurationError`
        If a key is invalid; when training starts, if the trainer, the model, or the validation data
        are of another kind.
    """  # noqa: E501

    reads_metrics = False

    def __init__(
        self,
        serialization_dir: str,
        num_prompts: int = 4,
        predictor_args: Optional[Dict[str, Any]] = None,
    ) -> None:
        super().__init__(serialization_dir)
        if num_prompts < 1:
            raise ConfigurationError(
                f"'num_prompts' of the callback \"{NAME}\" is {num_prompts}: write at least 1, or "
                "remove the callback."
            )
        # Without what AllenNLP passes to each predictor.
        _, _, *known, _ = inspect.signature(CausalLMPredictor).parameters
        for key in predictor_args or {}:
            if key not in known:
                raise ConfigurationError(
                    f"'predictor_args.{key}' of the callback \"{NAME}\" is unknown: the predictor "
                    f"has {', '.join(known)}."
                )
        self._num_prompts = num_prompts
        self._predictor_args = {"max_new_tokens": _MAX_NEW_TOKENS, **(predictor_args or {})}
        self._prompts: List[List[int]] = []
        self._predictor: Optional[CausalLMPredictor] = None
        self._is_validated = False

    @override
    def on_start(self, trainer: Any, is_primary: bool = True, **kwargs: Any) -> None:
        super().on_start(trainer, is_primary=is_primary, **kwargs)
        model, loader = trainer.model, trainer._validation_data_loader
        loader = getattr(loader, "data_loader", loader)  # of all ranks' batches
        reader = getattr(loader, "reader", None)
        if not hasattr(trainer, "evaluation") or not (
            isinstance(model, CausalLM) and isinstance(reader, CausalLMReader)
        ):
            raise ConfigurationError(
                f"The callback \"{NAME}\" needs a trainer of type 'deepspeed', and a model and "
                "'validation_data_path' with a reader of type 'causal_lm': write them, or remove "
                "the callback."
            )
        if model.sequence_sharing is not None:
            raise ConfigurationError(
                f"The callback \"{NAME}\" can't generate with 'trainer.sequence_parallel_size', "
                "with which each worker has a part of a sequence: remove one of them."
            )
        try:
            self._predictor = CausalLMPredictor(model, reader, frozen=False, **self._predictor_args)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"'predictor_args' of the callback \"{NAME}\": {error.message}"
            ) from error
        rows = islice(read_rows(loader.data_path), self._num_prompts)
        self._prompts = [_tokenize(row, self._predictor) for row in rows]
        limits = ModelLimits.from_model(model.transformer)
        length = max(map(len, self._prompts)) + self._predictor_args["max_new_tokens"]
        if limits.has_position_table and length > limits.num_positions:
            raise ConfigurationError(
                f'The callback "{NAME}" would generate up to position {length}, but the model '
                f"has {limits.num_positions} positions: write a smaller 'max_new_tokens' in "
                "'predictor_args', or begin the validation data with shorter prompts."
            )

    @override
    def on_batch(self, *args: Any, is_training: bool = True, **kwargs: Any) -> None:
        self._is_validated |= not is_training

    @override
    def on_epoch(
        self,
        trainer: Any,
        metrics: Dict[str, Any],
        epoch: int,
        is_primary: bool = True,
        **kwargs: Any,
    ) -> None:
        if not self._is_validated:
            return
        self._is_validated = False
        assert self._predictor is not None
        with trainer.evaluation(of_validation=True):
            completions = self._predictor.complete(self._prompts, dist.get_world_size() > 1)
        trainer.report("completions", completions=completions)
        if dist.get_rank() != 0:
            return
        texts = [_text(completion) for completion in completions]
        announce(logger, "Completions after epoch %d:\n%s", epoch + 1, "\n".join(texts))
        for callback in trainer.callbacks:
            if isinstance(callback, TensorBoardCallback):
                for i, text in enumerate(texts):
                    # As code, because TensorBoard shows Markdown.
                    callback._validation_log.add_text(f"completions/{i}", f"    {text}", epoch + 1)


def _tokenize(row: Row, predictor: CausalLMPredictor) -> List[int]:
    record = row.parse()
    if "prompt" not in record and "messages" not in record:
        raise row.error(
            f"The callback \"{NAME}\" needs prompts, and the row has no 'prompt' or 'messages': "
            "add them, or remove the callback."
        )
    try:
        return predictor.tokenize(record)
    except ConfigurationError as error:
        raise row.error(error.message) from error


def _text(completion: JsonDict) -> str:
    prompt, response = (
        json.dumps(completion[key], ensure_ascii=False) for key in ("prompt", "response")
    )
    return f"{prompt} -> {response}"
