import json
from typing import Any, Callable, Dict, List, Optional

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.common.util import JsonDict
from allennlp.data import DatasetReader, Instance
from allennlp.models import Model
from allennlp.predictors import Predictor
from transformers import GenerationConfig, StoppingCriteria
from typing_extensions import override

from allennlp_deepspeed.models.language_modeling.assistant_spans import Conversation, Message
from allennlp_deepspeed.models.language_modeling.causal_lm import CausalLM
from allennlp_deepspeed.models.language_modeling.causal_lm_reader import CausalLMReader
from allennlp_deepspeed.models.language_modeling.end_tokens import end_tokens
from allennlp_deepspeed.models.language_modeling.example_tokenizer import to_template_kwargs

_INPUTS = '{"prompt": ...}, {"text": ...} or {"messages": [...]}'


@Predictor.register("causal_lm")
class CausalLMPredictor(Predictor):
    """
    Generates responses with a `CausalLM`. Takes `{"prompt": ...}`, `{"text": ...}` or
    `{"messages": [...]}` as the "causal_lm" reader does, ignoring responses, and returns
    `{"response": ..., "finish_reason": ...}`. The `finish_reason` is "stop", or "length" after
    `max_new_tokens`. A response ends at the tokenizer's end-of-sequence token, the end-of-turn
    token of its chat template, or another end token of the model's generation config.

    Registered as a `Predictor` with name "causal_lm".

    # Parameters

    model : `Model`, required.
        A `CausalLM`.
    dataset_reader : `DatasetReader`, required.
        A `CausalLMReader`.
    max_new_tokens : `int`, optional (default = `256`)
        The maximum number of tokens of a response.
    sample : `bool`, optional (default = `False`)
        Whether to sample tokens instead of taking the most probable token.
    temperature : `float`, optional (default = `1.0`)
        The divisor of the logits before sampling.
    top_k : `int`, optional (default = `None`)
        Samples from this number of most probable tokens.
    top_p : `float`, optional (default = `None`)
        Samples from the most probable tokens whose total probability reaches this value.
    seed : `int`, optional (default = `0`)
        The random seed, which is set again for each batch of inputs.
    stop : `List[str]`, optional (default = `None`)
        Strings that end a response and are removed from it. They may be special tokens of the
        tokenizer.
    """

    def __init__(
        self,
        model: Model,
        dataset_reader: DatasetReader,
        max_new_tokens: int = 256,
        sample: bool = False,
        temperature: float = 1.0,
        top_k: Optional[int] = None,
        top_p: Optional[float] = None,
        seed: int = 0,
        stop: Optional[List[str]] = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, dataset_reader, **kwargs)
        if not isinstance(model, CausalLM) or not isinstance(dataset_reader, CausalLMReader):
            raise ConfigurationError(
                "The predictor 'causal_lm' is for a model and a reader of type 'causal_lm', and "
                f"not for {type(model).__name__} and {type(dataset_reader).__name__}."
            )
        if max_new_tokens < 1:
            raise ConfigurationError(
                f"'max_new_tokens' of the predictor is {max_new_tokens}: write at least 1."
            )
        drawing = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        if sample and temperature <= 0:
            raise ConfigurationError(
                f"'temperature' of the predictor is {temperature}: write a number above 0, or "
                '"sample": false for the most probable tokens.'
            )
        if not sample and drawing != {"temperature": 1.0, "top_k": None, "top_p": None}:
            raise ConfigurationError(
                "The predictor has 'temperature', 'top_k' or 'top_p', which need sampling: write "
                '"sample": true, or remove them.'
            )
        self._seed = seed
        self._tokenizer = dataset_reader.tokenizer
        # The text of a response contains no special tokens.
        special_ends = _special_tokens(stop or [], self._tokenizer)
        self._stop = [text for text in stop or [] if text not in special_ends]
        self._example_tokenizer = dataset_reader.example_tokenizer
        self._transformer: Any = model.transformer
        ends = [*end_tokens(self._tokenizer, self._transformer), *special_ends.values()]
        self._ends = list(dict.fromkeys(ends))
        pad_id = self._tokenizer.pad_token_id
        self._pad_id = 0 if pad_id is None else pad_id
        given = {"temperature": temperature, "top_k": top_k or 0, "top_p": top_p or 1.0}
        self._generation_config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=sample,
            eos_token_id=self._ends or None,
            pad_token_id=self._pad_id,
            **(given if sample else {}),
        )

    def predict(self, prompt: str) -> JsonDict:
        """
        Generates the response to a prompt.

        # Returns

        `Dict[str, Any]`
            The "response" and its "finish_reason".
        """
        return self.predict_json({"prompt": prompt})

    @override
    def predict_json(self, inputs: JsonDict) -> JsonDict:
        return self.predict_batch_json([inputs])[0]

    @override
    def predict_batch_json(self, inputs: List[JsonDict]) -> List[JsonDict]:
        return [
            {key: completion[key] for key in ("response", "finish_reason")}
            for completion in self.complete([self.tokenize(each) for each in inputs])
        ]

    def complete(self, prompts: List[List[int]], synced_gpus: bool = False) -> List[JsonDict]:
        """
        Generates the responses of a batch, in the mode of the model. It changes no random state.

        # Parameters

        prompts : `List[List[int]]`, required.
            Token ids, as `tokenize` returns them.
        synced_gpus : `bool`, optional (default = `False`)
            Whether all ranks, which must then call it, generate until the last has finished.

        # Returns

        `List[Dict[str, Any]]`
            The "prompt" as the model sees it, the "response" and its "finish_reason".
        """
        length = max(map(len, prompts))
        device = next(self._transformer.parameters()).device
        # Padded on the left, so that all prompts end at the same position.
        input_ids = [[self._pad_id] * (length - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        arguments: Dict[str, Any] = {}
        if self._stop:
            arguments["stopping_criteria"] = [_StopStrings(self._stop, self._text, length)]
        devices = [device] if device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            torch.manual_seed(self._seed)
            # Of the model's own config, values would be used for arguments that are unset.
            own_config = self._transformer.generation_config
            self._transformer.generation_config = self._generation_config
            try:
                generated = self._transformer.generate(
                    input_ids=torch.tensor(input_ids, device=device),
                    attention_mask=torch.tensor(mask, device=device),
                    synced_gpus=synced_gpus,
                    **arguments,
                )
            finally:
                self._transformer.generation_config = own_config
        return [
            {"prompt": self._tokenizer.decode(prompt), **self._response(tokens[length:].tolist())}
            for prompt, tokens in zip(prompts, generated)
        ]

    def tokenize(self, inputs: JsonDict) -> List[int]:
        """
        Returns the token ids of a prompt.

        # Raises

        `ConfigurationError`
            If the inputs have no prompt.
        """
        given = inputs.get("messages", inputs.get("prompt", inputs.get("text")))
        if isinstance(given, list):
            tokens = self._example_tokenizer.tokenize_messages(_conversation(given, inputs))
        elif isinstance(given, str):
            tokens = self._example_tokenizer.tokenize_prompt(given)
        else:
            raise ConfigurationError(f"Expected {_INPUTS}, and not {inputs!r}.")
        if not tokens:
            raise ConfigurationError(f"The input {inputs!r} has no token to continue from.")
        return tokens

    def _response(self, tokens: List[int]) -> JsonDict:
        end = next((i for i, token in enumerate(tokens) if token in self._ends), None)
        text = self._text(tokens[:end])
        stops = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if stops:
            text = text[: min(stops)]
        is_stopped = end is not None or bool(stops)
        return {"response": text, "finish_reason": "stop" if is_stopped else "length"}

    def _text(self, tokens: List[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    @override
    def _json_to_instance(self, json_dict: JsonDict) -> Instance:
        keys = ("text", "prompt", "response", "messages", "tools", "chat_template_kwargs")
        return self._dataset_reader.text_to_instance(
            **{key: json_dict[key] for key in keys if key in json_dict}
        )


def _conversation(messages: List[Message], inputs: JsonDict) -> Conversation:
    """Returns the conversation without the responses at its end."""
    messages = list(messages)
    while messages and messages[-1].get("role") == "assistant":
        messages.pop()
    if not messages:
        raise ConfigurationError(
            f"The input {inputs!r} has no message to answer: add one whose 'role' is \"user\"."
        )
    given = {key: inputs.get(key) for key in ("tools", "chat_template_kwargs")}
    return Conversation(messages, to_template_kwargs(**given))


def _special_tokens(stop: List[str], tokenizer: Any) -> Dict[str, int]:
    """
    Returns the strings that are special tokens, and their indices.

    # Raises

    `ConfigurationError`
        If a string contains a special token and other text.
    """
    special = {str(each): i for i, each in tokenizer.added_tokens_decoder.items() if each.special}
    for text in stop:
        for token in special:
            if token in text and text not in special:
                raise ConfigurationError(
                    f"'stop' of the predictor has {json.dumps(text)}, which contains the special "
                    f"token {json.dumps(token)} and other text: write the special token alone."
                )
    return {text: special[text] for text in stop if text in special}


class _StopStrings(StoppingCriteria):
    """
    Stopping criterion for strings. The one of transformers has to know how a tokenizer decodes
    tokens, which it doesn't for every tokenizer.

    # Parameters

    stop : `List[str]`, required.
    text : `Callable[[List[int]], str]`, required.
        Decodes tokens.
    prompt_length : `int`, required.
        The number of tokens before the generated ones.
    """

    def __init__(
        self, stop: List[str], text: Callable[[List[int]], str], prompt_length: int
    ) -> None:
        self._stop = stop
        self._text = text
        self._prompt_length = prompt_length

    @override
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        texts = [self._text(tokens) for tokens in input_ids[:, self._prompt_length :].tolist()]
        are_stopped = [any(stop in text for stop in self._stop) for text in texts]
        return torch.tensor(are_stopped, device=input_ids.device)
