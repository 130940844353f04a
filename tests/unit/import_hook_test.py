"""
What AllenNLP lacks on today's libraries, given to it before it is imported, and how that comes into
every Python.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Set, Tuple
from zipfile import ZipFile

import huggingface_hub
import pytest
import torch
import transformers
from allennlp.common import cached_transformers
from allennlp.modules.transformer import TransformerStack
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from allennlp_deepspeed_import_hook import ENVIRONMENT_VARIABLE, shims
from tests.support import minilm_outputs
from tests.support.bare_python import BarePython
from tests.support.command import REPOSITORY

PARTS = ("setup.py", "pyproject.toml", "README.md", "MANIFEST.in", "allennlp_deepspeed.pth")
PACKAGES = ("allennlp_deepspeed", "allennlp_deepspeed_import_hook")

SHOW = """
import site, sys
site.addsitedir(sys.argv[1])
print([finder.__name__ for finder in sys.meta_path if finder.__module__ in sys.argv[2:]])
print("transformers" in sys.modules, "allennlp" in sys.modules)
"""


@pytest.fixture(scope="module", params=["build_wheel", "build_editable"])
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


def _run(*arguments: Any, **kwargs: Any) -> str:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=60, **kwargs
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


def test_pip_knows_the_file_that_it_has_to_remove(site_directory: Path):
    (record,) = site_directory.glob("*.dist-info/RECORD")
    assert "allennlp_deepspeed.pth," in record.read_text()


def test_a_python_without_the_package_starts(tmp_path: Path):
    shutil.copy(REPOSITORY / "allennlp_deepspeed.pth", tmp_path)
    shown = _run("-I", "-S", "-c", SHOW, tmp_path, "allennlp_deepspeed_import_hook")
    assert shown.splitlines() == ["[]", "False False"]


def test_this_package_is_imported_without_collecting_garbage(tmp_path: Path) -> None:
    package = tmp_path / "allennlp_deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text("import gc\nprint(gc.isenabled())\n")
    (tmp_path / "sitecustomize.py").write_text("import allennlp_deepspeed_import_hook")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    code = "import gc, allennlp_deepspeed; print(gc.isenabled())"
    assert _run("-c", code, env=environment, cwd=tmp_path).split() == ["False", "True"]


def test_a_folder_with_the_name_alone_is_found(tmp_path: Path) -> None:
    """As in the folder in which a checkout is."""
    (tmp_path / "allennlp_deepspeed").mkdir()
    code = (
        f"import sys; sys.path[:] = [{str(tmp_path)!r}, *sys.path[1:]]\n"
        "from importlib.machinery import PathFinder\n"
        "import allennlp_deepspeed_import_hook as hook\n"
        "sys.meta_path[:] = [hook._Finder, PathFinder]\n"
        "sys.path[1:] = []\n"
        "print(hook._Finder.find_spec('allennlp_deepspeed').loader)"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    assert _run("-c", code, env=environment, cwd=tmp_path).split()[-1] == "None"


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (("-c", "from allennlp.__main__ import run; run()"), "False False True True"),
        (("-m", "allennlp"), "False False True True"),
        (("-c", "import allennlp.commands"), "False False True False"),
        (("-c", "import gc; gc.disable(); import allennlp.commands"), "False False False False"),
    ],
    ids=["command", "module", "notebook", "switched off before"],
)
def test_allennlp_is_imported_without_collecting_garbage(
    tmp_path: Path, arguments: Tuple[str, str], expected: str
):
    """
    Whether Python collects while it imports the package, its commands, and in the end, and whether
    it leaves them out then.
    """
    package = tmp_path / "allennlp"
    package.mkdir()
    (package / "__init__.py").write_text("import gc\nis_enabled = gc.isenabled()\n")
    (package / "__main__.py").write_text(
        "def run():\n    import allennlp.commands\n\nif __name__ == '__main__':\n    run()\n"
    )
    (package / "commands.py").write_text(
        # Python 3.12 has some objects left out from the beginning.
        "import atexit, gc\nfrom allennlp import is_enabled\n"
        "both, count = (is_enabled, gc.isenabled()), gc.get_freeze_count()\n"
        "atexit.register(lambda: print(*both, gc.isenabled(), gc.get_freeze_count() > count))"
    )
    (tmp_path / "sitecustomize.py").write_text("import allennlp_deepspeed_import_hook")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    assert _run(*arguments, env=environment).strip() == expected


@pytest.mark.parametrize(
    "before, generation", [("", 2), ("gc.freeze(); ", 0)], ids=["", "user has left some out"]
)
def test_what_is_imported_is_not_looked_through_next(
    tmp_path: Path, before: str, generation: int
) -> None:
    """In which generation what the package has made is, where no command has it left out."""
    package = tmp_path / "allennlp"
    package.mkdir()
    (package / "__init__.py").write_text("made = [[]]\n")
    (tmp_path / "sitecustomize.py").write_text("import allennlp_deepspeed_import_hook")
    code = (
        f"import gc; gc.disable(); {before}import allennlp\n"
        "print([any(o is allennlp.made for o in gc.get_objects(i)) for i in range(3)].index(True))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    assert _run("-c", code, env=environment, cwd=tmp_path).strip() == str(generation)


# A package of the name, which says when it is imported, and a module of AllenNLP's that imports it.
SPACY = {
    "spacy/__init__.py": "print('imported')\n__version__ = '3'\nfrom spacy import tokens\n"
    "def load(name): return name\n",
    "spacy/tokens/__init__.py": "class Token: pass\n",
    "spacy/cli/__init__.py": "from spacy.cli.download import download",
    "spacy/cli/download.py": "def download(name): print('downloaded', name)\n",
    "allennlp/__init__.py": "import spacy\n",
    "allennlp/common/__init__.py": "",
    "allennlp/common/util.py": """
from typing import Dict, List
import spacy
from spacy.cli.download import download
from spacy.tokens import Token as SpacyToken
models: Dict[str, SpacyToken] = {}
def first(tokens: List[spacy.tokens.Token]) -> SpacyToken: return tokens[0]
def is_token(x): return isinstance(x, (spacy.tokens.Token, SpacyToken))
""",
}


@pytest.mark.parametrize(
    "code, printed",
    [
        ("print(util.is_token('x'), util.models)", ["False {}"]),
        ("print(issubclass(int, util.SpacyToken))", ["False"]),
        ("print(util.spacy.__version__)", ["imported", "3"]),
        ("util.download('it')", ["imported", "downloaded it"]),
        ("util.spacy.cli.download('it')", ["imported", "downloaded it"]),
        ("print(util.is_token(util.SpacyToken()))", ["imported", "True"]),
        ("import spacy; print(util.is_token(spacy.tokens.Token()))", ["imported", "True"]),
        (
            "import spacy; print(issubclass(spacy.tokens.Token, util.SpacyToken))",
            ["imported", "True"],
        ),
        (
            "from unittest import mock\n"
            "with mock.patch('allennlp.common.util.spacy.load', len): import spacy\n"
            "with mock.patch('allennlp.common.util.spacy.load', len): print(spacy.load('four'))\n"
            "print(spacy.load('four'))",
            ["imported", "4", "four"],
        ),
        ("util.spacy.other", ["imported", "AttributeError"]),
        (
            "import spacy; util.is_token('x')\n"
            "print(util.SpacyToken is spacy.tokens.Token, util.spacy is spacy)",
            ["imported", "True True"],
        ),
        ("class Own(util.SpacyToken): pass\nprint(util.is_token(Own()))", ["imported", "True"]),
        ("sys.modules['spacy'] = None; print(util.is_token('x'))", ["False"]),
    ],
    ids=str,
)
def test_packages_that_few_need_are_imported_when_they_are_used(
    tmp_path: Path, code: str, printed: List[str]
) -> None:
    _write(tmp_path, SPACY)
    assert _shown_by(tmp_path, f"from allennlp.common import util\n{code}") == printed


@pytest.mark.parametrize(
    "code, printed",
    [
        ("import spacy; from allennlp.common import util", ["imported", "True True"]),
        ("from allennlp.common import util; import spacy", ["imported", "False True"]),
    ],
)
def test_a_package_that_is_there_is_not_put_off(
    tmp_path: Path, code: str, printed: List[str]
) -> None:
    _write(tmp_path, SPACY)
    code += "\nprint(util.SpacyToken is spacy.tokens.Token, util.SpacyToken == util.SpacyToken)"
    assert _shown_by(tmp_path, code) == printed


def test_a_package_that_is_missing_is_missed_at_once(tmp_path: Path) -> None:
    """AllenNLP says which packages it needs."""
    files = {name: text for name, text in SPACY.items() if not name.startswith("spacy")}
    _write(tmp_path, files)
    code = "import sys; sys.path[:] = sys.path[:-1]\nimport allennlp"
    assert _shown_by(tmp_path, code, "-S") == ["ModuleNotFoundError"]


def _write(directory: Path, files: Dict[str, str]) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def _shown_by(directory: Path, code: str, *arguments: str) -> List[str]:
    """What Python prints, and the class of the exception that it ends with."""
    indented = "\n    ".join(code.splitlines())
    code = (
        f"import sys; sys.path.insert(0, {str(directory)!r})\n"
        "import allennlp_deepspeed_import_hook\n"
        f"try:\n    {indented}\nexcept Exception as e:\n    print(type(e).__name__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return _run(*arguments, "-c", code, env=environment, cwd=directory).splitlines()


# What takes longest to import, and what neither this package nor AllenNLP have a part in.
HOOK = "allennlp_deepspeed_import_hook"
FORKED_WITH = {
    "PyTorch": (HOOK, "torch"),
    # Which transformers' optimizers, too, import.
    "its compiler": (HOOK, "torch", "torch._dynamo", "torch.distributed.tensor", "sympy"),
}


class _Pythons(Dict[str, BarePython]):
    """Those of `FORKED_WITH`, each from when it is first asked for."""

    def __missing__(self, name: str) -> BarePython:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        self[name] = BarePython(FORKED_WITH[name], environment)
        return self[name]


@pytest.fixture(scope="module")
def pythons() -> Iterator[Dict[str, BarePython]]:
    pythons = _Pythons()
    yield pythons
    for python in pythons.values():
        python.close()


def _works(python: BarePython, code: str, directory: Path, *arguments: Any) -> None:
    """Code that prints "worked" at its end."""
    shown = python.run(code, directory / "model", *arguments, cwd=directory)
    assert shown.splitlines()[-1] == "worked", shown


def test_what_is_put_off_works_as_before(pythons: Dict[str, BarePython], tmp_path: Path) -> None:
    """With the packages themselves, which AllenNLP's commands don't import any more."""
    code = """
import sys
import allennlp.commands
assert not {"spacy", "nltk"} & set(sys.modules)
from allennlp.common.util import sanitize
from allennlp.data.fields import TextField
from allennlp.data.token_indexers import SpacyTokenIndexer
from allennlp.data.tokenizers import SpacyTokenizer, Token
assert sanitize({"tokens": [Token("a"), None, (1, "b")]}) == {"tokens": ["a", "None", [1, "b"]]}
TextField([Token("a")], {})
assert "spacy" not in sys.modules
import spacy
spacy.blank("en").to_disk(sys.argv[1])
tokens = SpacyTokenizer(language=sys.argv[1], keep_spacy_tokens=True).tokenize("Two words.")
assert [type(token) for token in tokens] == [spacy.tokens.Token] * 3
assert sanitize(tokens) == ["Two", "words", "."]
from allennlp.common import util
from spacy.cli.download import download
assert util.spacy_download is download
assert len(TextField(tokens, {"tokens": SpacyTokenIndexer()}).tokens) == 3
assert len(SpacyTokenIndexer().tokens_to_indices(tokens, None)["tokens"]) == 3
from typing import get_type_hints
from allennlp.training.metrics import EvalbBracketingScorer
import nltk
get_type_hints(EvalbBracketingScorer.__call__)
print("worked")
"""
    _works(pythons["PyTorch"], code, tmp_path)


# What takes longest to import, of what the commands don't use themselves.
HEAVY = [
    "nltk",
    "peft",
    "scipy.stats",
    "sklearn.svm",
    "spacy",
    "sympy",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor",
    "torchvision",
    "transformers.modeling_utils",
    "transformers.optimization",
]


@pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5,
    reason="transformers 4 have an AdamW, which AllenNLP's inherits from",
)
@pytest.mark.parametrize(
    "command, used",
    [
        (["--version"], set()),
        (["deepspeed", "check"], set()),
        # An optimizer steps on tensors without data, which PyTorch computes in Python.
        (["deepspeed", "estimate"], {"sympy", "torch._dynamo", "torch.distributed.tensor"}),
        # Optimizers leave themselves out of what the compiler compiles.
        (["train"], {"sympy", "torch._dynamo", "torch.distributed.tensor"}),
    ],
)
def test_a_command_imports_what_it_uses(
    pythons: Dict[str, BarePython], tmp_path: Path, command: List[str], used: Set[str]
) -> None:
    code = f"""
import sys
sys.argv[1:2] = {command!r}
if "train" in sys.argv:
    sys.argv += ["-s", "trained"]
from allennlp.__main__ import run
try:
    run()
except SystemExit as exit:
    assert not exit.code
print(sorted({set(HEAVY) - used!r} & set(sys.modules)) or "worked")
"""
    config = {
        "dataset_reader": {"type": "text_classification_json", "tokenizer": "whitespace"},
        "train_data_path": str(tmp_path / "train.jsonl"),
        "model": {
            "type": "basic_classifier",
            "text_field_embedder": {
                "token_embedders": {"tokens": {"type": "embedding", "embedding_dim": 4}}
            },
            "seq2vec_encoder": {"type": "lstm", "input_size": 4, "hidden_size": 4},
        },
        "data_loader": {"batch_size": 2},
        "trainer": {
            "type": "deepspeed",
            "deepspeed_config": "zero_2",
            "optimizer": {"type": "adam", "lr": 0.1},
            "num_epochs": 1,
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "train.jsonl").write_text('{"text": "a b", "label": "c"}\n' * 4)
    (tmp_path / ".allennlp_plugins").write_text("allennlp_deepspeed\n")
    files = [] if command == ["--version"] else [tmp_path / "config.json"]
    _works(pythons["PyTorch"], code, tmp_path, *files)


def test_heavy_imports_that_are_put_off_work_as_before(
    pythons: Dict[str, BarePython], tmp_path: Path
) -> None:
    """With the packages themselves."""
    code = """
import copy, pickle, sys
import torch
from torch.nn import Parameter
from allennlp.commands import main
from allennlp.common import Params
from allennlp.fairness import Independence
from allennlp.modules.transformer.activation_layer import ActivationLayer
from allennlp.training.learning_rate_schedulers import LearningRateScheduler
from allennlp.training.metrics import Auc, SpearmanCorrelation
from allennlp.training.optimizers import HuggingfaceAdafactor, Optimizer

metric = Independence(2, 2, dist_metric="wasserstein")
for copied in (metric, copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))):
    for _ in range(2):
        copied(torch.tensor([0, 1, 1, 0]), torch.tensor([0, 0, 1, 1]))
        distances = copied.get_metric()
        assert {label: round(float(d), 6) for label, d in distances.items()} == {0: 0.0, 1: 0.0}

auc = Auc()
auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
assert auc.get_metric() == 0.75
spearman = SpearmanCorrelation()
spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 4.0]))
assert round(spearman.get_metric(), 6) == 1.0

weight = Parameter(torch.ones(2, 3))
sgd = Optimizer.from_params(Params({"type": "sgd", "lr": 1.0}), model_parameters=[("w", weight)])
schedule = Params({"type": "constant_with_warmup", "num_warmup_steps": 2})
LearningRateScheduler.from_params(schedule, optimizer=sgd, num_epochs=1)
assert sgd.param_groups[0]["lr"] == 0.0

class Own(HuggingfaceAdafactor):
    pass

import transformers
from allennlp.modules.transformer import activation_layer
assert "gelu" in activation_layer.ACT2FN and len(list(activation_layer.ACT2FN)) > 5
assert issubclass(Own, transformers.Adafactor)
settings = {"type": "huggingface_adafactor", "lr": 0.1, "relative_step": False}
trained = [Parameter(torch.arange(6.0).view(2, 3)) for _ in range(2)]
optimizers = [
    Optimizer.from_params(Params(settings), model_parameters=[("w", trained[0])]),
    transformers.Adafactor([trained[1]], lr=0.1, relative_step=False),
]
for parameter, optimizer in zip(trained, optimizers):
    parameter.grad = torch.ones(2, 3)
    optimizer.step()
assert torch.equal(*trained) and not torch.equal(trained[0], torch.arange(6.0).view(2, 3))

layer = ActivationLayer(2, 2, "gelu")
assert type(layer.act_fn) is type(transformers.activations.ACT2FN["gelu"])
from allennlp.modules.token_embedders import pretrained_transformer_embedder as embedder
assert isinstance(transformers.XLNetConfig(), embedder.XLNetConfig)
assert not isinstance(transformers.BertConfig(), embedder.XLNetConfig)
from allennlp.data import image_loader
assert pickle.loads(pickle.dumps(image_loader.torchvision.io.read_image))
assert image_loader.torchvision is sys.modules["torchvision"]
print("worked")
"""
    _works(pythons["its compiler"], code, tmp_path)


def test_a_pickle_is_read_where_nothing_has_been_imported(
    pythons: Dict[str, BarePython], tmp_path: Path
) -> None:
    written = """
import pickle, sys, torch
from allennlp.fairness import Independence
from allennlp.training.optimizers import HuggingfaceAdafactor
metric = pickle.dumps(Independence(2, 2, dist_metric="wasserstein"))
assert b"allennlp_deepspeed" not in metric and "scipy.stats" not in sys.modules
weight = torch.nn.Parameter(torch.ones(2, 3))
optimizer = HuggingfaceAdafactor([("w", weight)], lr=0.1, relative_step=False)
open(sys.argv[1], "wb").write(pickle.dumps((metric, optimizer)))
print("worked")
"""
    read = """
import pickle, sys, torch
import allennlp.training.optimizers
metric, optimizer = pickle.loads(open(sys.argv[1], "rb").read())
((weight,),) = [group["params"] for group in optimizer.param_groups]
weight.grad = torch.ones(2, 3)
optimizer.step()
assert (weight != 1).all()
from scipy.stats import wasserstein_distance
assert pickle.loads(metric)._dist_metric is wasserstein_distance
print("worked")
"""
    _works(pythons["its compiler"], written, tmp_path)
    _works(pythons["PyTorch"], read, tmp_path)


def test_transformers_are_the_same_module_after_their_first_model(
    pythons: Dict[str, BarePython], tmp_path: Path
) -> None:
    code = """
import sys
import transformers
from allennlp.common import cached_transformers
former = getattr(transformers, "AdamW", None)
assert transformers.BertModel.__name__ == "BertModel"
assert cached_transformers.transformers is sys.modules["transformers"] is transformers
import transformers as again
assert again is transformers and getattr(again, "AdamW", None) is former
print("worked")
"""
    _works(pythons["PyTorch"], code, tmp_path)


@pytest.mark.parametrize("first", ["optimizer", "transformers"])
def test_the_base_of_an_optimizer_is_the_same_in_any_order(
    pythons: Dict[str, BarePython], tmp_path: Path, first: str
) -> None:
    used = {
        "optimizer": "HuggingfaceAdafactor([('w', Parameter(torch.ones(1)))])",
        "transformers": "transformers.Adafactor",
    }
    code = f"""
import torch
import transformers
from torch.nn import Parameter
from allennlp.training.optimizers import HuggingfaceAdafactor, Optimizer
{used[first]}
assert HuggingfaceAdafactor.__mro__[1:3] == (Optimizer, transformers.Adafactor)
assert isinstance({used["optimizer"]}, transformers.Adafactor)
print("worked")
"""
    _works(pythons["its compiler"], code, tmp_path)


@pytest.mark.parametrize("correct_bias", [True, False])
def test_adamw_steps_as_its_paper_says(correct_bias: bool):
    weight = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    settings: Dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 0.01, "weight_decay": 0.5}
    optimizer = shims.AdamW([weight], correct_bias=correct_bias, **settings)
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


@pytest.mark.parametrize("name", ["lr", "betas", "eps"])
def test_adamw_refuses_by_name_what_is_out_of_range(name: str):
    value = (0.9, 1.0) if name == "betas" else -1.0
    with pytest.raises(ValueError, match=name):
        shims.AdamW([torch.nn.Parameter(torch.ones(1))], **{name: value})


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
    assert shims.build_inputs_with_special_tokens(tokenizer, [1, 2]) == expected_single
    assert shims.build_inputs_with_special_tokens(tokenizer, [1, 2], [3]) == expected_pair
    assert shims.encode_plus(tokenizer, "b c")["input_ids"] == expected_single


def test_special_tokens_alone_where_there_is_no_text():
    single, pair, _, _ = TEMPLATES["bert"]
    assert shims.build_inputs_with_special_tokens(_tokenizer(single, pair), []) == [4, 5]


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


def test_pushing_to_the_hub_says_what_it_needs():
    with pytest.raises(RuntimeError, match="huggingface_hub<0.10"):
        shims.Dropped.get_token()


def test_tokens_offsets_and_embeddings_are_those_of_the_oldest_transformers():
    kept = json.loads(minilm_outputs.KEPT.read_text())
    found = json.loads(json.dumps(minilm_outputs.outputs()))
    assert found.keys() == kept.keys()
    for what, expected in kept.items():
        if what.startswith(("embeddings", "pooled")):
            assert found[what] == pytest.approx(expected, abs=1e-5), what
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


def test_models_are_loaded_in_the_type_that_is_asked_for(bert_in_fp16: str):
    cached_transformers._clear_caches()
    model = cached_transformers.get(bert_in_fp16, True, torch_dtype=torch.float16)
    cached_transformers._clear_caches()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}


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


def test_a_list_is_no_text():
    single, pair, _, _ = TEMPLATES["bert"]
    with pytest.raises(TypeError, match="list"):
        shims.encode_plus(_tokenizer(single, pair), ["b", "c"])  # type: ignore[arg-type]


def test_several_texts_and_pairs_become_tokens():
    single, pair, expected_single, expected_pair = TEMPLATES["bert"]
    tokenizer = _tokenizer(single, pair)
    texts = shims.batch_encode_plus(tokenizer, ["b c", "b c"])
    assert texts["input_ids"] == [expected_single] * 2
    pairs = shims.batch_encode_plus(tokenizer, [("b c", "d")])
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
        output = layer(expected)
        # A tuple before transformers 5.
        expected = output[0] if isinstance(output, tuple) else output
    mask = torch.ones(2, 5, dtype=torch.bool)
    torch.testing.assert_close(stack(given, mask).final_hidden_states, expected)


def test_the_toolkit_leaves_out_what_it_is_told_to(bert: str):
    with pytest.raises(RuntimeError, match="layers.1.output.dense.weight"):
        TransformerStack.from_pretrained_module(bert, ignore=[r".*layer\.1\.output\.dense"])


def test_the_toolkit_prefers_the_file_that_it_knows(bert: str, tmp_path: Path):
    shutil.copytree(bert, tmp_path / "bert")
    other = {
        name: weight + 1
        for name, weight in cached_transformers.get(bert, False).state_dict().items()
    }
    torch.save(other, tmp_path / "bert" / "pytorch_model.bin")
    module = TransformerStack.from_pretrained_module(str(tmp_path / "bert"))
    weight = module.layers[0].intermediate.dense.weight
    assert weight.equal(other["encoder.layer.0.intermediate.dense.weight"])


def test_other_libraries_see_what_the_hub_has():
    has_dropped = int(huggingface_hub.__version__.partition(".")[0]) >= 1
    assert hasattr(huggingface_hub, "HfFolder") is not has_dropped
