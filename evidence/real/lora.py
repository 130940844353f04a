"""
Low-rank adapters of SmolLM2-135M-Instruct, the demo's, trained on chapters of the World English
Bible that are cut to the same length.
"""

import sys
from pathlib import Path
from typing import Any, Dict, List

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from evidence.real import data
from evidence.real.recorder import Cell, Recorder

ADAPTERS: Dict[str, Any] = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
_SEED = 13

_reset_parameters = LoraLayer.reset_lora_parameters


def _reset_parameters_alike(*args: Any, **kwargs: Any) -> None:
    torch.manual_seed(_SEED)
    _reset_parameters(*args, **kwargs)


# Each tool draws other numbers before it initializes adapters.
LoraLayer.reset_lora_parameters = _reset_parameters_alike


def prepare(cell: Cell, tiny: bool) -> None:
    """Writes the data of a cell, and the model unless it is there."""
    directory = Path(cell.data) / "model"
    if not directory.exists():
        model = _write_tokenizer_and_load(directory, tiny)
        model.save_pretrained(directory)
    data.write(cell, [{"text": text} for text in _texts(cell, tiny)])


def _write_tokenizer_and_load(directory: Path, tiny: bool) -> PreTrainedModel:
    if tiny:
        from tests.fixtures.tiny_lm import LLAMA, tiny_tokenizer

        tiny_tokenizer(directory)
        torch.manual_seed(_SEED)
        return LlamaForCausalLM(LlamaConfig(**LLAMA))
    from demo.llm import smollm2

    file = {"pretrained_model_name_or_path": smollm2().parent, "gguf_file": smollm2().name}
    AutoTokenizer.from_pretrained(**file).save_pretrained(directory)
    quantized = AutoModelForCausalLM.from_pretrained(**file, dtype=torch.float32)
    # Its weights aren't quantized any more, but it would refuse to be saved.
    config = quantized.config.to_dict()
    config.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig.from_dict(config))
    model.load_state_dict(quantized.state_dict())
    return model


def _texts(cell: Cell, tiny: bool) -> List[str]:
    """Texts of at least `max_length` tokens."""
    if tiny:
        from tests.fixtures.tiny_lm import WORDS

        return [" ".join((WORDS[i:] + WORDS) * 2) for i in range(len(WORDS))]
    from demo.prepare_translations import read_chapters

    return [text for _, text in read_chapters() if len(text) > 8 * cell.max_length]


def config(cell: Cell) -> Dict[str, Any]:
    """What a config of AllenNLP has in addition to the trainer's section."""
    model = f"{cell.data}/model"
    reader = {"type": "causal_lm", "tokenizer": model, "max_length": cell.max_length}
    return {
        "dataset_reader": reader,
        "vocabulary": {"type": "empty"},
        "model": {
            "type": "causal_lm",
            "model_name": model,
            "lora": ADAPTERS,
            # As TRL does.
            "save_adapters_only": True,
        },
    }


def trl(cell: Cell) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from evidence.real import transformers_steps

    args = SFTConfig(
        **transformers_steps.arguments(cell),
        max_length=cell.max_length,
        # Its default takes less memory and more time.
        gradient_checkpointing=False,
    )
    trainer = SFTTrainer(
        model=f"{cell.data}/model",
        args=args,
        train_dataset=Dataset.from_list(data.by_batch(cell)),
        peft_config=LoraConfig(**ADAPTERS, task_type="CAUSAL_LM"),
    )
    transformers_steps.train(trainer)


def bare(cell: Cell) -> None:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    tokenizer = AutoTokenizer.from_pretrained(f"{cell.data}/model")
    model = AutoModelForCausalLM.from_pretrained(f"{cell.data}/model")
    model = get_peft_model(model, LoraConfig(**ADAPTERS, task_type="CAUSAL_LM"))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(trainable, lr=1e-5, weight_decay=0.0),
        config=cell.deepspeed_config(),
    )
    recorder = Recorder(
        lambda: engine.save_checkpoint(cell.output, tag="last", exclude_frozen_parameters=True)
    )
    engine.train()
    for batch in data.batches_of(cell, engine.global_rank):
        texts = [example["text"] for example in batch]
        tokens = tokenizer(
            texts, max_length=cell.max_length, truncation=True, return_tensors="pt"
        ).to(engine.device)
        loss = engine(**tokens, labels=tokens["input_ids"]).loss
        engine.backward(loss)
        is_boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        recorder.loss(loss)
        if is_boundary:
            recorder.step()
    engine.save_checkpoint(cell.output, tag="end", exclude_frozen_parameters=True)


if __name__ == "__main__":
    {"trl": trl, "bare": bare}[sys.argv[1]](Cell.read())
