"""What computes positions by itself computes the same tile by tile, and nothing else is tiled."""

from typing import List

import pytest
import torch
from allennlp.common.checks import ConfigurationError
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from allennlp_deepspeed.extensions.sequence_tiling import tile_modules


class Layer(torch.nn.Module):
    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp
        self.unused = torch.nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.mlp(hidden)


def feed_forward(*others: torch.nn.Module) -> torch.nn.Module:
    layers = [torch.nn.Linear(4, 9), torch.nn.GELU(), *others, torch.nn.Linear(9, 4)]
    return torch.nn.Sequential(*layers)


class Mixing(torch.nn.Module):
    """Of positions that aren't neighbours."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + hidden.roll(2, dims=1)


class FunctionalDropout(torch.nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(hidden, 0.2, self.training)


def test_dropout_is_found_where_the_first_pass_is_an_evaluation() -> None:
    torch.manual_seed(1)
    layer, hidden = Layer(FunctionalDropout()).eval(), torch.randn(2, 16, 4)
    undo = tile_modules(layer, {"modules": ["mlp$"], "num_tiles": 2}, zero_stage=0)
    layer(hidden)
    with pytest.raises(ConfigurationError, match="without dropout"):
        layer.train()(hidden)
    undo()


def test_layers_that_view_all_positions_as_rows() -> None:
    torch.manual_seed(1)
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 11, "n_positions": 16}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model, ids = GPT2LMHeadModel(GPT2Config(**sizes, **dropout)), torch.randint(11, (3, 13))
    expected = gradients(model, ids)
    undo = tile_modules(model, {"modules": ["mlp$"], "num_tiles": 4}, zero_stage=0)
    actual = gradients(model, ids)
    undo()
    torch.testing.assert_close(actual, expected)


def gradients(model: GPT2LMHeadModel, ids: torch.Tensor) -> List[torch.Tensor]:
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss, *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize(
    "mlp, pattern, expected",
    [
        (feed_forward(), "ffn", "has 'ffn', which matches the name of no module"),
        (feed_forward(torch.nn.Dropout(0.1)), "mlp$", "mlp.2 is dropout"),
        (Mixing(), "mlp$", "whose output depends on other positions"),
        (torch.nn.ReLU(inplace=True), "mlp$", "which changes its input in place"),
        (torch.nn.GRU(4, 4), "mlp$", "whose output depends on other positions"),
        (torch.nn.Bilinear(4, 4, 4), "mlp$", "takes more than one tensor"),
    ],
)
def test_what_would_be_wrong_is_refused(mlp: torch.nn.Module, pattern: str, expected: str) -> None:
    layer = Layer(mlp)
    with pytest.raises(ConfigurationError, match=expected) as error:
        undo = tile_modules(layer, {"modules": [pattern], "num_tiles": 2}, zero_stage=0)
        hidden = torch.randn(2, 5, 4)
        layer.mlp(*[hidden] * (2 if isinstance(mlp, torch.nn.Bilinear) else 1))
        undo()
    assert "trainer.sequence_tiling" in str(error.value)


class Gated(torch.nn.Module):
    """Multiplies by a gate, which it has or a layer around it has computed."""

    def __init__(self, gate: torch.Tensor) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.gates = [gate]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden) * self.gates[0]


@pytest.mark.parametrize("is_computed", [True, False])
def test_a_gradient_of_what_is_not_the_module_s_is_refused(is_computed: bool) -> None:
    weight = torch.nn.Parameter(torch.rand(4))
    layer = Layer(Gated(weight.sigmoid() if is_computed else weight))
    undo = tile_modules(layer, {"modules": ["mlp$"], "num_tiles": 2}, zero_stage=0)
    output = layer(torch.randn(2, 6, 4))
    with pytest.raises(ConfigurationError, match="mlp"):
        output.sum().backward()
    undo()


class Regularized(torch.nn.Module):
    """Keeps its activations, or what they cost, for a loss outside."""

    def __init__(self, keeps_list: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.keeps_list = keeps_list

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = self.linear(hidden)
        self.kept = [output] if self.keeps_list else output.square().mean()
        return output


@pytest.mark.parametrize("keeps_list", [True, False])
def test_a_loss_of_what_a_module_keeps_is_refused(keeps_list: bool) -> None:
    layer = Layer(Regularized(keeps_list))
    undo = tile_modules(layer, {"modules": ["mlp$"], "num_tiles": 2}, zero_stage=0)
    output = layer(torch.randn(2, 6, 4))
    with pytest.raises(ConfigurationError, match="mlp.kept"):
        output.sum().backward()
    undo()


def test_computed_weights_are_not_of_a_tile() -> None:
    linear = torch.nn.utils.weight_norm(torch.nn.Linear(4, 4))
    layer, hidden = Layer(torch.nn.Sequential(linear)), torch.randn(2, 6, 4)
    layer(hidden).sum().backward()
    expected = linear.weight_g.grad.clone()
    layer.zero_grad()
    undo = tile_modules(layer, {"modules": ["mlp$"], "num_tiles": 2}, zero_stage=0)
    layer(hidden).sum().backward()
    undo()
    torch.testing.assert_close(linear.weight_g.grad, expected)


def test_the_loss_of_routers_keeps_its_gradient() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 11}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, output_router_logits=True))
    with pytest.raises(ConfigurationError, match="output_router_logits"):
        tile_modules(model, {"modules": ["mlp$"], "num_tiles": 2}, zero_stage=0)
    model.config.output_router_logits = False
    tile_modules(model, {"modules": ["mlp$"], "num_tiles": 2}, zero_stage=0)()
