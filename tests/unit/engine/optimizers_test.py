"""Registered optimizers, and what is checked of them beforehand."""

import json
from typing import Any, Callable, Dict, List, Tuple

import pytest
import torch
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.training.optimizers import Optimizer

from allennlp_deepspeed.launch import train_command
from tests.fixtures import components  # noqa: F401  # "record_steps"
from tests.support.experiment import load_config

GROUPS = [[["bias"], {"lr": 0.03, "weight_decay": 0.0}], [["nothing"], {}]]

ADAM = {"type": "adam", "lr": 0.01, "weight_decay": 0.1, "betas": [0.8, 0.99]}
ADAMW = {**ADAM, "type": "adamw"}

Parameters = List[Tuple[str, torch.nn.Parameter]]


def construct(params: Dict[str, Any]) -> Tuple[Parameters, torch.optim.Optimizer]:
    torch.manual_seed(0)
    parameters = [
        ("embedder.weight", torch.nn.Parameter(torch.randn(13, 7))),
        ("layer.weight", torch.nn.Parameter(torch.randn(9, 7))),
        ("layer.bias", torch.nn.Parameter(torch.randn(37))),
        ("output.weight", torch.nn.Parameter(torch.randn(4, 9))),
    ]
    return parameters, Optimizer.from_params(Params(dict(params)), model_parameters=parameters)


def weights_after_steps(
    parameters: Parameters, optimizer: torch.optim.Optimizer, num_steps: int = 20
) -> torch.Tensor:
    for step in range(num_steps):
        torch.manual_seed(step)
        for name, parameter in parameters:
            parameter.grad = torch.randn_like(parameter) * 0.1 ** (step % 3)
            if name == "embedder.weight":
                parameter.grad[5:] = 0  # of words that don't occur
                parameter.grad[:5] *= step > 3
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for _, parameter in parameters])


def assert_steps_alike(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name, reference",
    [("fused_adam", ADAM), ("cpu_adam", ADAM), ("fused_adamw", ADAMW), ("cpu_adamw", ADAMW)],
)
def test_a_fused_optimizer_steps_as_the_one_that_is_not(name: str, reference: Dict[str, Any]):
    reference = {**reference, "parameter_groups": GROUPS}
    expected = weights_after_steps(*construct(reference))
    parameters, optimizer = construct({**reference, "type": name})
    assert all(group["fused"] for group in optimizer.param_groups)
    assert_steps_alike(weights_after_steps(parameters, optimizer), expected)


def test_lion_is_that_of_the_paper():
    parameters, optimizer = construct({"type": "lion", "lr": 0.1, "weight_decay": 0.5})
    (_, weight), average = parameters[1], torch.zeros(9, 7)
    expected = weight.detach().clone()
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        # Algorithm 2, line by line.
        update = torch.sign(0.9 * average + 0.1 * weight.grad)
        expected = expected - 0.1 * (update + 0.5 * expected)
        average = 0.99 * average + 0.01 * weight.grad
        optimizer.step()
    assert_steps_alike(weight.detach(), expected)


class TestMuon:
    def test_muon_steps_the_matrices_of_hidden_layers(self):
        parameters, optimizer = construct({"type": "muon"})
        muon, adam = optimizer.param_groups
        assert (muon["use_muon"], muon["lr"], muon["params"]) == (True, 0.02, [parameters[1][1]])
        assert (adam["use_muon"], adam["lr"], len(adam["params"])) == (False, 3e-4, 3)

    def test_an_encoder_in_an_embedder_is_hidden(self):
        shapes = {
            "_text_field_embedder.token_embedder_tokens.embeddings.word_embeddings.weight": (5, 4),
            "_text_field_embedder.token_embedder_tokens.encoder.layer.0.query.weight": (4, 4),
            "_text_field_embedder.token_embedder_tokens.encoder.layer.0.query.bias": (4,),
            "_text_field_embedder.token_embedder_characters.weight": (5, 4),
            "_encoder.conv_layer_0.weight": (4, 4, 2),
            "_feedforward.weight": (4, 4),
            "_classification_layer.weight": (2, 4),
        }
        parameters = [(n, torch.nn.Parameter(torch.ones(shape))) for n, shape in shapes.items()]
        Optimizer.from_params(Params({"type": "muon"}), model_parameters=parameters)
        assert [name.split(".")[-2] for name, p in parameters if p.use_muon] == [
            "query",
            "_feedforward",
        ]

    def test_the_config_chooses_and_groups(self):
        groups = [[["layer"], {"lr": 0.1, "adam_lr": 0.2}]]
        params = {"type": "muon", "muon_parameters": ["weight"], "parameter_groups": groups}
        parameters, optimizer = construct(params)
        assert [
            (group["use_muon"], group["lr"], len(group["params"]))
            for group in optimizer.param_groups
        ] == [(True, 0.1, 1), (False, 0.2, 1), (True, 0.02, 2)]

    @pytest.mark.parametrize(
        "params, message",
        [
            ({"muon_parameters": ["layer"]}, "matches layer.bias, which isn't a matrix"),
            (
                {"parameter_groups": [[["layer"], {"betas": [0.9, 0.9]}]]},
                'parameter_groups\' has "betas", which is unknown to "muon"',
            ),
        ],
    )
    def test_what_it_cannot_do_is_refused(self, params: Dict[str, Any], message: str):
        with pytest.raises(ConfigurationError) as error:
            construct({"type": "muon", **params})
        assert message in error.value.message


def check(optimizer: Any, deepspeed_config: Any = "zero_2", cuda_device: int = -1, **trainer: Any):
    """What `allennlp train` checks before it reads any data."""
    config = load_config("tagger", {"trainer.type": "deepspeed"})
    config["trainer"].update(
        optimizer=optimizer, deepspeed_config=deepspeed_config, cuda_device=cuda_device, **trainer
    )
    train_command.check(Params(config))


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigurationError) as error:
        check(*args, **kwargs)
    return error.value.message


FORCED = {"type": "zero_2_offload", "zero_force_ds_cpu_optimizer": True}


@pytest.mark.parametrize(
    "optimizer, settings",
    [
        ("fused_lion", {}),  # former names
        ("fused_lamb", {}),
        ("onebit_adam", {}),
        ("onebit_lamb", {}),
        ("zero_one_adam", {}),
        ("muon", {"grad_norm": 1.0}),
        ("muon", {"deepspeed_config": {"zero_optimization": {"stage": 3, "reduce_scatter": True}}}),
        ("adagrad", {"deepspeed_config": FORCED}),
    ],
    ids=json.dumps,
)
def test_one_that_could_not_step_is_refused_beforehand(
    optimizer: Any, settings: Dict[str, Any], expect_message: Callable[[str], None]
):
    expect_message(refusal(optimizer, **settings))


def test_the_same_ones_are_accepted_where_they_step():
    for name in ("cpu_adam", "fused_adamw"):
        check(name, "zero_2_offload", cuda_device=0)
        check(name, "zero_3")
    check({"type": "muon"}, {"zero_optimization": {"stage": 0}}, grad_norm=1.0)
    check("muon", "zero_3")
    check("adagrad", {**FORCED, "zero_force_ds_cpu_optimizer": False})
