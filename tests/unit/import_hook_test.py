"""
AllenNLP is given what it lacks on today's libraries, in each Python of an environment.
"""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, List
from zipfile import ZipFile

import huggingface_hub
import pytest
import torch
import transformers
from allennlp.common import cached_transformers
from allennlp.modules.transformer import TransformerStack
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from allennlp_deepspeed_import_hook import ENVIRONMENT_VARIABLE, former_adamw
from tests.support import minilm_outputs
from tests.support.command import REPOSITORY

STARTUP = ("allennlp_deepspeed.pth", "allennlp_deepspeed.start")
PARTS = ("setup.py", "pyproject.toml", "README.md", "MANIFEST.in", *STARTUP)
PACKAGES = ("allennlp_deepspeed", "allennlp_deepspeed_import_hook")

SHOW = """
import site, sys
site.addsitedir(sys.argv[1])
print([finder.__name__ for finder in sys.meta_path if finder.__module__ in sys.argv[2:]])
print("transformers" in sys.modules, "allennlp" in sys.modules)
"""


@pytest.fixture(scope="module", params=["build_editable"])
def site_directory(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip would unpack into an environment."""
    project = tmp_path_factory.mktemp("project")
    for name in PARTS:
        shutil.copy(REPOSITORY / name, project)
    for name in PACKAGES:
        shutil.copytree(REPOSITORY / name, project / name)
    build = f"import setuptools.build_meta as b; print('wheel:', b.{request.param}('.'))"
    output = _run("-c", build, cwd=project)
    match = re.search("wheel: (.*)", output)
    assert match is not None, output
    site_directory = project / "site"
    ZipFile(project / match[1]).extractall(site_directory)
    return site_directory


WITHOUT_PLUGIN_FILE = """
import sys
from allennlp.commands import main
for name in ("trainer.json", "train_loop.json"):
    sys.argv = ["allennlp", "train", name, "-s", "out"]
    try:
        main()
    except Exception as error:
        print(error.message)
print("allennlp_deepspeed" in sys.modules)
sys.argv = ["allennlp", "deepspeed", "--version"]
main()
"""


def test_the_command_is_there_and_the_trainer_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expect_message: Any
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    ours = {"type": "deepspeed"}
    for name, config in (("trainer", {"trainer": ours}), ("train_loop", {**ours, "trainer": {}})):
        config = {"train_data_path": "does not exist", **config}
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    code = "import allennlp_deepspeed_import_hook" + WITHOUT_PLUGIN_FILE
    *_, trainer, train_loop, is_imported, version = _run("-c", code, cwd=tmp_path).splitlines()
    expect_message(f"{trainer}\n{train_loop}")
    assert is_imported == "False"
    assert version.startswith("allennlp-deepspeed ")


def _run(*arguments: Any, **kwargs: Any) -> str:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=150, **kwargs
    ).stdout


def test_every_python_is_ready_for_allennlp(site_directory: Path):
    shown = _run("-I", "-S", "-c", SHOW, site_directory, "allennlp_deepspeed_import_hook")
    assert shown.splitlines() == ["['_Finder']", "False False"]


def test_an_environment_variable_switches_it_off(site_directory: Path):
    # Not `-I`, with which the environment isn't read.
    arguments = ("-S", "-c", SHOW, site_directory, "allennlp_deepspeed_import_hook")
    off = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = _run(*arguments, env={**off, ENVIRONMENT_VARIABLE: "0"}, cwd=site_directory)
    assert shown.splitlines() == ["[]", "False False"]


def test_entry_points_of_python_3_15_install_the_same_finder_once():
    """As that version calls the functions that a `.start` file names."""
    code = """
import pkgutil, sys
sys.path.insert(0, sys.argv[1])
with open(sys.argv[1] + "/allennlp_deepspeed.start") as file:
    for entry_point in file.read().split():
        pkgutil.resolve_name(entry_point)()
print([finder.__name__ for finder in sys.meta_path if finder.__module__ == sys.argv[2]])
"""
    shown = _run("-I", "-S", "-c", code, REPOSITORY, "allennlp_deepspeed_import_hook")
    assert shown.splitlines() == ["['_Finder']"]


def test_a_python_without_the_package_starts(tmp_path: Path):
    shutil.copy(REPOSITORY / "allennlp_deepspeed.pth", tmp_path)
    shown = _run("-I", "-S", "-c", SHOW, tmp_path, "allennlp_deepspeed_import_hook")
    assert shown.splitlines() == ["[]", "False False"]


@pytest.mark.parametrize("trainer, is_started", [("deepspeed", True), ("gradient_descent", False)])
def test_a_command_has_its_workers_import_beside_it(
    tmp_path: Path, trainer: str, is_started: bool
) -> None:
    """AllenNLP is an empty package here."""
    (tmp_path / "allennlp").mkdir()
    (tmp_path / "allennlp" / "__init__.py").touch()
    script = tmp_path / "bin" / "allennlp"
    script.parent.mkdir()
    script.write_text(
        f"""
import sys
sys.path[:0] = [{str(REPOSITORY)!r}, {str(tmp_path)!r}]
import allennlp_deepspeed_import_hook, psutil
import allennlp
print(len(psutil.Process().children()) > 0)
"""
    )
    config = json.dumps({"distributed": {"cuda_devices": [-1]}, "trainer": {"type": trainer}})
    assert _run(script, "train", config, cwd=tmp_path).split() == [str(is_started)]


@pytest.mark.parametrize(
    "arguments, is_told",
    [
        (["train", '{"trainer": {"type": "deepspeed"}}'], True),
        (["deepspeed", "env"], True),
        (["train", '{"trainer": {"type": "gradient_descent"}}'], False),
        (["predict", "model.tar.gz", "deepspeed"], False),
    ],
)
def test_a_terminal_is_told_what_takes_seconds(
    tmp_path: Path, arguments: List[str], is_told: bool
) -> None:
    """Before AllenNLP is imported, which fails here."""
    script = tmp_path / "allennlp"
    script.write_text(
        f"""
import sys
sys.path[:0] = [{str(REPOSITORY)!r}, {str(tmp_path)!r}]
import allennlp_deepspeed_import_hook
sys.path.insert(0, {str(tmp_path / "failing")!r})
import allennlp
"""
    )
    (tmp_path / "failing" / "allennlp").mkdir(parents=True)
    (tmp_path / "failing" / "allennlp" / "__init__.py").write_text("raise SystemExit(3)")
    terminal, side_of_command = pty.openpty()
    for stderr in (side_of_command, subprocess.PIPE):
        command = [sys.executable, str(script), *arguments]
        run = subprocess.run(command, stderr=stderr, timeout=60, cwd=tmp_path)
        assert run.returncode == 3 and not run.stderr
    os.set_blocking(terminal, False)
    printed = b""
    with suppress(BlockingIOError):
        printed = os.read(terminal, 1000)
    assert (b"AllenNLP" in printed) is is_told
    os.close(side_of_command)
    os.close(terminal)


def test_a_process_that_a_command_spawns_starts_no_server(tmp_path: Path) -> None:
    """It has the command's arguments, and imports its main module. AllenNLP is empty here."""
    (tmp_path / "allennlp").mkdir()
    (tmp_path / "allennlp" / "__init__.py").touch()
    main = f"""
import sys
sys.path[:0] = [{str(REPOSITORY)!r}, {str(tmp_path)!r}]
import allennlp_deepspeed_import_hook, allennlp, multiprocessing, psutil

def count(connection):
    connection.send(len(psutil.Process().children()))

if __name__ == "__main__":
    own = len(psutil.Process().children()) > 0
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=count, args=(writer,))
    process.start()
    print(own, reader.recv())
    process.join()
"""
    (tmp_path / "allennlp_command").mkdir()
    script = tmp_path / "allennlp_command" / "allennlp"
    script.write_text(main)
    config = json.dumps({"distributed": {"cuda_devices": [-1]}, "trainer": {"type": "deepspeed"}})
    assert _run(script, "train", config, cwd=tmp_path).split() == ["True", "0"]


@pytest.mark.parametrize("name", ["rouge", "overrides", "allennlp_deepspeed_import_hook.shims"])
def test_a_program_that_is_not_allennlp_imports_nothing_more(name: str, tmp_path: Path) -> None:
    """A popular package has the name of one that allennlp-models imports."""
    (tmp_path / "rouge.py").touch()
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import allennlp_deepspeed_import_hook
import {name}
print([each for each in ("torch", "transformers", "nltk", "numpy") if each in sys.modules])
if {name!r} != "allennlp_deepspeed_import_hook.shims":
    print("allennlp_deepspeed_import_hook.shims" in sys.modules)
"""
    assert _run("-c", code, cwd=REPOSITORY).split() in (["[]"], ["[]", "False"])


# A command needs none of them to parse its arguments, nor to start workers.
LATE = (
    *("nltk", "peft", "scipy.stats", "sklearn", "sympy", "transformers.modeling_utils"),
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"),
)


@pytest.mark.parametrize("package", ["allennlp.commands", "allennlp_deepspeed"])
def test_a_command_starts_without_what_it_may_not_need(package: str) -> None:
    code = f"""
import sys
import allennlp_deepspeed_import_hook, {package}
print([name for name in {LATE} if name in sys.modules])
"""
    assert _run("-c", code, cwd=REPOSITORY).splitlines()[-1] == "[]"


USES_OF_LATE_MODULES = """
import allennlp_deepspeed_import_hook, allennlp.commands
import torch, torchvision, scipy.stats, nltk
from allennlp.modules.transformer import ActivationLayer
from allennlp.training.metrics import Auc, SpearmanCorrelation
from allennlp.training.metrics.evalb_bracketing_scorer import Tree
from transformers.trainer_utils import unwrap_peft_model

values, labels = torch.tensor([0.1, 0.9, 0.3, 0.6]), torch.tensor([0, 1, 1, 0])
auc, spearman = Auc(), SpearmanCorrelation()
auc(values, labels)
spearman(values, labels.float())
layer = ActivationLayer(4, 4, "gelu")
expected = torch.nn.functional.gelu(layer.dense(values))
module = torch.nn.Linear(1, 1)
torch.use_deterministic_algorithms(True)
boxes = torchvision.ops.roi_align(torch.ones(1, 1, 4, 4), [torch.tensor([[0.0, 0, 4, 4]])], 2)
print([
    auc.get_metric(),
    bool(spearman.get_metric() == scipy.stats.spearmanr(values, labels).correlation),
    torch.equal(layer(values), expected),
    Tree.fromstring("(S a)") == nltk.Tree.fromstring("(S a)"),
    unwrap_peft_model(module) is module,
    boxes.flatten().tolist(),
])
"""


def test_what_is_imported_later_works_as_before() -> None:
    shown = _run("-c", USES_OF_LATE_MODULES, cwd=REPOSITORY).splitlines()[-1]
    assert shown == str([0.75, True, True, True, True, [1.0] * 4])


PROJECT = """
import allennlp_deepspeed_import_hook
import torch
from overrides import EnforceOverrides, final, overrides

class Base:
    def method(self, one): ...
    @final
    def last(self): ...

def override_differently():
    class Other(Base):
        @overrides
        def method(self): ...

def misspell():
    class Other(Base):
        @overrides
        def metod(self, one): ...

def override_final():
    class Other(Base):
        @overrides
        def last(self): ...

def refuses(define):
    try:
        define()
    except TypeError:
        return True
    return False

print([refuses(define) for define in (override_differently, misspell, override_final)])

from allennlp.data import DatasetReader
from allennlp.models import Model
from allennlp.predictors import Predictor

class Reader(DatasetReader):
    @overrides
    def _read(self, file_path): yield from ()
    @overrides
    def text_to_instance(self, text: str, labels: list = None): ...

class Sub(Reader):
    # A method of AllenNLP 1.
    @overrides
    def _instances_to_cache_file(self, cache_filename, instances): ...
    @overrides(check_signature=True)
    def text_to_instance(self, words, tags=None, *, ids=None): ...

class Classifier(Model):
    @overrides
    def forward(self, tokens, label=None): ...

class Encoder(torch.nn.Module):
    @overrides()
    def forward(self, tokens, mask): ...

class Predict(Predictor):
    @overrides
    def _json_to_instance(self, json_dict): ...

class Enforced(EnforceOverrides):
    def method(self, one): ...

class Enforcing(Enforced):
    @overrides
    def method(self): ...

print([refuses(define) for define in (override_differently, misspell, override_final)])
"""


def test_projects_override_methods_with_other_arguments() -> None:
    """And those that don't import AllenNLP have their signatures compared."""
    before, after = _run("-c", PROJECT, cwd=REPOSITORY).splitlines()
    assert before == "[True, True, True]" and after == "[False, True, True]"


@pytest.mark.parametrize("correct_bias", [True, False])
def test_adamw_steps_as_its_paper_says(correct_bias: bool):
    weight = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    settings: Dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 0.01, "weight_decay": 0.5}
    optimizer = former_adamw.AdamW([weight], correct_bias=correct_bias, **settings)
    expected, mean, square = 2.0, 0.0, 0.0
    for step, gradient in enumerate([1.0, -3.0, 0.5], start=1):
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        mean = 0.8 * mean + 0.2 * gradient
        square = 0.9 * square + 0.1 * gradient**2
        size = 0.1
        if correct_bias:
            size *= (1 - 0.9**step) ** 0.5 / (1 - 0.8**step)
        expected -= size * mean / (square**0.5 + 0.01)
        expected -= 0.1 * 0.5 * expected
    assert weight.item() == pytest.approx(expected, rel=1e-12)


# Special tokens around a text and around and between two, as BERT, RoBERTa and GPT-2 have them.
TEMPLATES = {
    "bert": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [4, 1, 2, 5], [4, 1, 2, 5, 3, 5]),
    "roberta": (
        "[CLS] $A [SEP]",
        "[CLS] $A [SEP] [SEP] $B [SEP]",
        [4, 1, 2, 5],
        [4, 1, 2, 5, 5, 3, 5],
    ),
    "gpt2": ("$A", "$A $B", [1, 2], [1, 2, 3]),
    "t5": ("$A [SEP]", "$A $B [SEP]", [1, 2, 5], [1, 2, 3, 5]),
    "xlnet": ("$A [SEP] [CLS]", "$A [SEP] $B [SEP] [CLS]", [1, 2, 5, 4], [1, 2, 5, 3, 5, 4]),
    "second first": ("[CLS] $A", "$B [SEP] $A [CLS]", [4, 1, 2], [3, 5, 1, 2, 4]),
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_special_tokens_are_those_of_the_tokenizer(kind: str):
    single, pair, expected_single, expected_pair = TEMPLATES[kind]
    tokenizer = _tokenizer(single, pair)
    assert tokenizer.build_inputs_with_special_tokens([1, 2]) == expected_single
    assert tokenizer.build_inputs_with_special_tokens([1, 2], [3]) == expected_pair
    assert tokenizer.encode_plus("b c")["input_ids"] == expected_single


def test_special_tokens_alone_where_there_is_no_text():
    single, pair, _, _ = TEMPLATES["bert"]
    assert _tokenizer(single, pair).build_inputs_with_special_tokens([]) == [4, 5]


def _tokenizer(single: str, pair: str) -> transformers.PreTrainedTokenizerFast:
    words: List[str] = ["a", "b", "c", "d", "[CLS]", "[SEP]"]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[("[CLS]", 4), ("[SEP]", 5)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_tokens_offsets_and_embeddings_are_those_of_transformers_4():
    kept = json.loads(minilm_outputs.KEPT.read_text())
    found = json.loads(json.dumps(minilm_outputs.outputs()))
    assert found.keys() == kept.keys()
    for what, expected in kept.items():
        if what.startswith(("embeddings", "pooled")):
            # Sums of 384 numbers in fp32, which processors add up in different orders.
            tolerance = 1e-5 * max(map(abs, expected))
            assert found[what] == pytest.approx(expected, abs=tolerance), what
        else:
            assert found[what] == expected, what


@pytest.fixture(scope="module")
def bert_in_fp16(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=4, num_hidden_layers=3, num_attention_heads=1, intermediate_size=4
    )
    directory = tmp_path_factory.mktemp("bert")
    transformers.BertModel(config).half().save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("load_weights", [True, False])
def test_models_are_loaded_in_fp32(bert_in_fp16: str, load_weights: bool):
    model = cached_transformers.get(bert_in_fp16, True, load_weights=load_weights)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("reinit_modules", [1, (2,), (r"layer\.2",)])
def test_layers_are_initialized_anew(bert_in_fp16: str, reinit_modules: Any):
    loaded = dict(cached_transformers.get(bert_in_fp16, True).named_parameters())
    model = cached_transformers.get(bert_in_fp16, True, reinit_modules=reinit_modules)
    changed = {name for name, p in model.named_parameters() if not p.equal(loaded[name])}
    assert changed
    # Biases of 0 and norms of 1 are again what they were.
    assert all(name.startswith("encoder.layer.2.") for name in changed)
    weights = {name for name in loaded if re.search(r"layer\.2.*(query|dense)\.weight", name)}
    assert weights <= changed


def test_several_texts_and_pairs_become_tokens():
    single, pair, expected_single, expected_pair = TEMPLATES["bert"]
    tokenizer = _tokenizer(single, pair)
    texts = tokenizer.batch_encode_plus(["b c", "b c"])
    assert texts["input_ids"] == [expected_single] * 2
    pairs = tokenizer.batch_encode_plus([("b c", "d")])
    assert pairs["input_ids"] == [expected_pair]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = transformers.BertConfig(
        vocab_size=9,
        hidden_size=12,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=7,
    )
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("bert")
    transformers.BertForMaskedLM(config).save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("num_layers", [3, 2])
def test_the_toolkit_reads_safetensors(bert: str, num_layers: int):
    assert not os.path.exists(os.path.join(bert, "pytorch_model.bin"))
    stack = TransformerStack.from_pretrained_module(
        bert, num_hidden_layers=num_layers, strict=num_layers == 3
    ).eval()
    layers = cached_transformers.get(bert, False).eval().encoder.layer[:num_layers]
    given = expected = torch.randn(2, 5, 12)
    for layer in layers:
        expected = layer(expected)
    mask = torch.ones(2, 5, dtype=torch.bool)
    torch.testing.assert_close(stack(given, mask).final_hidden_states, expected)


def test_other_libraries_see_what_the_hub_has():
    assert not hasattr(huggingface_hub, "HfFolder")
