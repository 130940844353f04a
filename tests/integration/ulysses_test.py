"""Several workers that each have a part of a sequence compute what one does that has all of it."""

import copy
from typing import Any, Dict, List, Tuple

import deepspeed
import pytest
import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from allennlp_deepspeed.engine.process.process_environment import process_environment
from allennlp_deepspeed.engine.process.sequence_groups import SequenceGroup
from allennlp_deepspeed.extensions.ulysses import SUPPORTED_MODEL_TYPES, UlyssesAttention
from tests.support.experiment import assert_same_outputs
from tests.support.workers import run_workers

VOCABULARY, LENGTH = 23, 13  # no multiple of the number of workers


ITS_OWN: Dict[str, Dict[str, Any]] = {
    "gemma": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 6},
    "glm": {"head_dim": 8},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}

# What rotary embeddings have in a config.
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
SCALED: Dict[str, Dict[str, Any]] = {
    "llama3": {
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 4,
    },
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 4},
}


def tiny(model_type: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(5)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **{"num_key_value_heads": 2, "attn_implementation": "sdpa", **changes},
    )
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def batch(is_packed: bool) -> Tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    ids = torch.randint(VOCABULARY, (3, LENGTH), generator=generator)
    positions = torch.arange(LENGTH).repeat(3, 1)
    if is_packed:
        positions[0, 4:] -= 4
        positions[0, 11:] -= 7
        positions[2, 8:] -= 8
    return ids, positions


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    """One of which each position has its own part."""
    return (logits.float().log_softmax(dim=-1) ** 2).sum()


def numbers_in_attributes(model: PreTrainedModel) -> Dict[Tuple[str, str], Any]:
    return {
        (name, key): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (int, float))
    }


def shared(
    model: PreTrainedModel, size: int, is_packed: bool
) -> List[Tuple[List[List[float]], Dict[str, Any]]]:
    """The logits and the gradients of each worker."""

    def work(rank: int) -> Tuple[Any, Dict[str, Any]]:
        with process_environment(torch.device("cpu"), rank):
            deepspeed.init_distributed("gloo", verbose=False)
        own = copy.deepcopy(model)
        ids, positions = batch(is_packed)
        attention = UlyssesAttention(own, SequenceGroup.create(size))
        before = numbers_in_attributes(own)
        part = attention.shard(ids, 0)
        with attention.forward_context(positions, is_packed) as own_positions:
            logits = own(input_ids=part, position_ids=own_positions, use_cache=False).logits
        start = attention.group.rank * part.size(1)
        logits = logits[:, : max(0, LENGTH - start)]
        loss_of(logits).backward()
        # What has changed would be saved as a state of training, for any number of workers.
        assert numbers_in_attributes(own) == before
        attention.remove()
        gradients = {}
        for name, parameter in own.named_parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                gradients[name] = parameter.grad.numpy()
        return logits.detach().numpy(), gradients

    return run_workers(size, work)


def assert_shares(model: PreTrainedModel, size: int = 2, is_packed: bool = False) -> None:
    ids, positions = batch(is_packed)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    loss_of(logits).backward()
    results = shared(copy.deepcopy(model).eval(), size, is_packed)
    parts = torch.cat([torch.tensor(part) for part, _ in results], dim=1)
    assert_same_outputs(parts, logits, tolerance=1e-4)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == results[0][1].keys()
    for name, gradient in gradients.items():
        scale = gradient.abs().max()
        assert scale > 0 or name.endswith("k_proj.bias") or "attention.dense" in name, name
        shared_gradient = torch.tensor(results[0][1][name])
        torch.testing.assert_close(shared_gradient, gradient, atol=1e-4 * scale + 1e-6, rtol=1e-3)


# The others attend as "llama" does.
OF_THEIR_OWN = ("gemma3_text", "glm", "gpt2", "gpt_bigcode", "gpt_neox", "llama", "olmo2", "phi")


@pytest.mark.parametrize(
    "model_type",
    [
        name if name in OF_THEIR_OWN else pytest.param(name, marks=pytest.mark.soak)
        for name in SUPPORTED_MODEL_TYPES
    ],
)
def test_each_model_type(model_type: str) -> None:
    assert_shares(tiny(model_type, **ITS_OWN.get(model_type, {})), is_packed=True)


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_without_a_mask(model_type: str) -> None:
    assert_shares(tiny(model_type))


@pytest.mark.parametrize("num_kv_heads, size", [(1, 4), (4, 2)])
def test_heads_for_keys_are_divided_or_repeated(size: int, num_kv_heads: int) -> None:
    assert_shares(tiny("llama", num_key_value_heads=num_kv_heads), size, is_packed=True)


def test_sliding_windows_of_some_layers() -> None:
    windows = {
        "sliding_window": 5,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    assert_shares(tiny("qwen3", **windows))
    assert_shares(tiny("mistral", sliding_window=5), is_packed=True)


@pytest.mark.parametrize("rope_type", ["llama3", "yarn"])
def test_rotary_embeddings_of_any_length(rope_type: str) -> None:
    parameters = {"rope_type": rope_type, **SCALED[rope_type], "rope_theta": 10000.0}
    assert_shares(tiny("llama", rope_parameters=parameters))


@pytest.mark.parametrize(
    "model, size, expected",
    [
        (tiny("opt"), 2, "the model type 'opt'"),
        (tiny("llama"), 3, "attention heads, 4, and of key-value heads, 2"),
        (tiny("llama", attn_implementation="eager"), 2, "attn_implementation is 'eager'"),
        (
            tiny("qwen3", layer_types=["full_attention", "chunked_attention"]),
            2,
            "has layers of chunked_attention",
        ),
        (tiny("llama", rope_parameters=DYNAMIC), 2, "rope_type 'dynamic'"),
        (
            tiny("phi3", original_max_position_embeddings=8, rope_scaling=LONGROPE),
            2,
            "rope_type 'longrope'",
        ),
    ],
)
def test_what_is_not_shown_to_be_right_is_refused(
    model: PreTrainedModel, size: int, expected: str
) -> None:
    with pytest.raises(ConfigurationError, match=expected) as error:
        UlyssesAttention(model, SequenceGroup(None, size, 0))  # type: ignore[arg-type]
    assert "trainer.sequence_parallel_size" in str(error.value)


def test_the_attention_is_the_former_one_afterwards() -> None:
    model = tiny("llama")
    ids, _ = batch(is_packed=False)
    expected = model(input_ids=ids).logits
    attention = UlyssesAttention(model, SequenceGroup(None, 2, 0))  # type: ignore[arg-type]
    attention.remove()
    torch.testing.assert_close(model(input_ids=ids).logits, expected)
