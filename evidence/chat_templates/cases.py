"""Trainings that are compared with TRL's: chat templates, data, adapters, stages and workers."""

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from evidence.chat_templates.conversations import (
    CONVERSATIONS,
    Record,
    prompt_and_response,
    with_parts,
)

NUM_STEPS, BATCH_SIZE = 6, 2

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
DORA = {**LORA, "use_dora": True}

MESSAGES, ALL, PROMPTS, TEXTS = "messages", "messages, all tokens", "prompt messages", "texts"
"""
Forms of the data: messages with a loss on responses or on all tokens, prompts and responses that
are messages, and those that are texts.
"""

_KINDS = ("one turn", "two turns", "spaces", "two turns", "one turn")


class Case(NamedTuple):
    """
    A training.

    # Parameters

    template : `str`
        The name of a chat template of TRL's, or `"smollm2"`.
    lora : `Dict[str, Any]`, optional (default = `None`)
    accumulation : `int`, optional (default = `1`)
    stage : `int`, optional (default = `0`)
    world_size : `int`, optional (default = `1`)
        The number of workers of this package.
    data : `str`, optional (default = `MESSAGES`)
    has_marks : `bool`, optional (default = `False`)
        Whether the reader takes TRL's training template.
    has_parts : `bool`, optional (default = `False`)
        Whether contents are lists of parts.
    max_length : `int`, optional (default = `None`)
    adds_bos : `bool`, optional (default = `False`)
        Whether the tokenizer begins each text with a token, which the template begins with too.
    trl_workers : `int`, optional (default = `1`)
        The number of workers of TRL. One has the batches of all workers.
    trl : `Dict[str, Any]`, optional (default = `{}`)
        Further settings of TRL.
    killed_after : `int`, optional (default = `None`)
        The step after which this package's workers are killed, to recover from a checkpoint.
    footnote : `str`, optional (default = `""`)
        Why the losses differ.
    """

    template: str
    lora: Optional[Dict[str, Any]] = None
    accumulation: int = 1
    stage: int = 0
    world_size: int = 1
    data: str = MESSAGES
    has_marks: bool = False
    has_parts: bool = False
    max_length: Optional[int] = None
    adds_bos: bool = False
    trl_workers: int = 1
    trl: Dict[str, Any] = {}
    killed_after: Optional[int] = None
    footnote: str = ""

    @property
    def kind(self) -> str:
        return "full" if self.lora is None else "DoRA" if "use_dora" in self.lora else "LoRA"

    @property
    def data_and_options(self) -> str:
        options = {
            self.data: True,
            "lists of parts": self.has_parts,
            "training template": self.has_marks,
            f"`max_length` {self.max_length}": self.max_length,
            "BOS by tokenizer": self.adds_bos,
            f"killed after step {self.killed_after}": self.killed_after,
            **{f"`{name}={value}`": True for name, value in self.trl.items()},
        }
        return ", ".join(name for name, is_set in options.items() if is_set)

    def records(self) -> List[Record]:
        """Returns examples of different lengths, one after the other."""
        made = []
        for i in range(NUM_STEPS * BATCH_SIZE * self.accumulation * self.world_size):
            messages = CONVERSATIONS[_KINDS[i % len(_KINDS)]]["messages"]
            texts = (f"{m['content']} {'and so on ' * (i % 4)}{i}" for m in messages)
            record = {"messages": [{**m, "content": text} for m, text in zip(messages, texts)]}
            if self.has_parts:
                record = with_parts(record)
            if self.data in (PROMPTS, TEXTS):
                record = prompt_and_response(record)
            if self.data == TEXTS:
                prompt = "\n".join(m["content"] for m in record["prompt"])
                record = {"prompt": prompt, "response": f" {record['response'][0]['content']}"}
            made.append(record)
        return made


_MEAN_OF_MEANS = (
    "With `average_tokens_across_devices=False` TRL averages the workers' means, which weights the "
    "tokens of a worker with fewer of them more. Its default is the mean over all tokens of the "
    "step, and so is the loss here, which no key changes."
)
_LEFT_OUT = (
    "`max_length` leaves some examples no token with a loss. TRL leaves them out and fills the "
    "batch with the next examples. Here they stay in their batch, where they have no effect, and a "
    "warning counts them."
)
_PROMPT_TOO = (
    "The template without marks. Those of TRL's training template include the end of the "
    "generation prompt, `<|start|>assistant`, which isn't a response here. With that template as "
    "the reader's `chat_template` the losses are equal."
)

CASES: Tuple[Case, ...] = (
    Case("cohere", LORA, 2, 3, 2),
    Case("cohere2"),
    Case("deepseek_r1_distill", LORA, 1, 2, 2, has_marks=True),
    Case("deepseekv3", None, 2, 0, 2, has_marks=True),
    Case("diffusion_gemma", DORA, 1, 2),
    Case("gemma", None, 1, 2, 2),
    Case("gemma3", LORA),
    Case("gemma3", None, 1, 3, 2, adds_bos=True),
    Case("gemma4", LORA, 2, 0, 2, data=PROMPTS),
    Case("gemma4_v5", None, 1, 2, 2, data=PROMPTS),
    Case("glm4moe", None, 2, 2, 2),
    Case("gptoss", None, 2, 3, has_marks=True),
    Case("gptoss", None, 2, 3, footnote=_PROMPT_TOO),
    Case("idefics3", LORA, 1, 3, has_parts=True),
    Case("lfm2", None, 3, 0, 2),
    Case("lfm2_2_5", DORA, 2, 3, 2),
    Case("lfm2_v2", DORA, 1, 3, 2),
    Case("llama3", LORA, 3),
    Case("llama3", DORA, 1, 2, 2, adds_bos=True),
    Case("llama3_1", DORA, 2, 0, 2, data=PROMPTS, adds_bos=True),
    Case("llama3_2", None, 1, 3, 2, data=PROMPTS),
    Case("llava_next", None, 2, 2, has_marks=True, has_parts=True),
    Case("muse_glimmer", LORA, 1, 0, 2, has_marks=True),
    Case("nemotron_3_nano", DORA, 1, 2, 2, has_marks=True),
    Case("phi3", None, 2),
    Case("phi3_5", DORA, 2),
    Case("qwen2_5", LORA, 2, 3, 2, has_marks=True),
    Case("qwen2_5_vl", None, 1, 2, 2),
    Case("qwen3", None, 2, 3, 2, has_marks=True),
    Case("qwen3", LORA, 1, 2, 2, data=PROMPTS, max_length=180),
    Case("qwen3_6", LORA, 3, 2, has_marks=True),
    Case("qwen3_instruct_2507", None, 3, 3),
    Case("qwen3_vl", LORA, 2, 2),
    Case("smolvlm", DORA, 2, 0, 2, has_parts=True),
    Case("smollm2", None, 2, 2, 2, data=ALL),
    Case("smollm2", LORA, 1, 3, 2, data=PROMPTS),
    Case("smollm2", DORA, 2, data=PROMPTS),
    Case("smollm2", None, 1, 0, 2, data=TEXTS),
    Case("smollm2", LORA, 2, 2, 2, data=TEXTS, adds_bos=True),
    Case("qwen2_5_vl", None, 1, 0, 2, max_length=120),
    Case("qwen2_5_vl", None, 1, 0, max_length=90, footnote=_LEFT_OUT),
    Case("qwen3_vl", None, 1, 0, 2, trl_workers=2),
    Case("qwen3_vl", LORA, 2, 2, 2, trl_workers=2),
    Case("qwen3_vl", DORA, 3, 3, 2, trl_workers=2),
    Case(
        "qwen3_vl",
        None,
        1,
        0,
        2,
        trl_workers=2,
        trl={"average_tokens_across_devices": False},
        footnote=_MEAN_OF_MEANS,
    ),
    Case("qwen3_vl", LORA, 2, 0, killed_after=5),
    Case("qwen3_vl", LORA, 1, 2, 2, killed_after=5),
    Case("qwen3_vl", DORA, 2, 3, 2, killed_after=5),
)
