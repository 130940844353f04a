"""The table of public projects: which commit, which config, and what they need."""

from typing import Any, Dict, NamedTuple, Optional, Sequence

# The value of a change that removes a key.
REMOVED = object()
# AllenNLP 2.0 has renamed it.
_CHECKPOINTS = {
    "trainer.checkpointer.num_serialized_models_to_keep": REMOVED,
    "trainer.checkpointer.keep_most_recent_by_count": 1,
}


class Project(NamedTuple):
    """
    # Parameters

    repository : `str`
        Owner and name.
    commit : `str`
    config : `str`
        Its path in `folder`.
    packages : `Sequence[str]`, optional (default = `()`)
        What `--include-package` names, besides ours.
    folder : `str`, optional (default = `"."`)
        Where its commands are run.
    fixtures : `Dict[str, Any]`, optional (default = `{}`)
        Dotted keys of the config and their values, which make it small: paths of data, sizes.
    changes : `Dict[str, Any]`, optional (default = `{}`)
        The same, for what the project's owner has to write today. The table lists them.
    files : `Dict[str, str]`, optional (default = `{}`)
        Data that the runner writes, by path.
    variables : `Dict[str, str]`, optional (default = `{}`)
        What its Jsonnet takes from the environment.
    predictor : `str`, optional (default = `None`)
        Predicts `sentence`. Without it, the dataset reader reads what is predicted.
    sentence : `Dict[str, Any]`, optional (default = `{}`)
    note : `str`, optional (default = `""`)
        What the project's owner has to do besides the changes.
    """

    repository: str
    commit: str
    config: str
    packages: Sequence[str] = ()
    folder: str = "."
    fixtures: Dict[str, Any] = {}
    changes: Dict[str, Any] = {}
    files: Dict[str, str] = {}
    variables: Dict[str, str] = {}
    predictor: Optional[str] = None
    sentence: Dict[str, Any] = {}
    note: str = ""

    @property
    def title(self) -> str:
        return f"{self.repository}: {self.config}"


def _paths(train: str, validation: Optional[str] = None) -> Dict[str, Any]:
    return {"train_data_path": train, "validation_data_path": validation or train}


_CONLL = "".join(
    f"{first} NNP B-NP B-PER\n{verb} VBD B-VP O\n{place} NNP B-NP B-LOC\n. . O O\n\n"
    for first, verb, place in (
        ("Ann", "left", "Oslo"),
        ("Bob", "likes", "Rome"),
        ("Cem", "saw", "Bonn"),
        ("Dan", "left", "Rome"),
        ("Eve", "likes", "Oslo"),
        ("Fay", "saw", "Bern"),
    )
)

PROJECTS = [
    Project(
        "allenai/allennlp-template-config-files",
        "5762e8f0363d150999e34c47406518c6a6d032c2",
        "tests/fixtures/config.json",
        ["my_project"],
        fixtures={"data_loader.batch_size": 1},
    ),
    Project(
        "allenai/allennlp-guide",
        "f6cb02cd15a985c04c2a7979df6db6f9c3960401",
        "my_text_classifier.jsonnet",
        ["my_text_classifier"],
        folder="quick_start",
        fixtures=_paths("data/movie_review/test.tsv", "data/movie_review/dev.tsv"),
        predictor="sentence_classifier",
        sentence={"sentence": "a very good movie"},
    ),
    Project(
        "jbarrow/allennlp_tutorial",
        "934e529d03a77c4a1121957a950c6a1b103e68dd",
        "configs/train_lstm.jsonnet",
        ["tagging"],
        fixtures={
            **_paths("data/train.txt"),
            "data_loader.batch_sampler.batch_size": 2,
            "model.embedder.token_embedders.tokens.pretrained_file": REMOVED,
        },
        files={"data/train.txt": _CONLL},
    ),
    Project(
        "jbarrow/allennlp_tutorial",
        "934e529d03a77c4a1121957a950c6a1b103e68dd",
        "configs/train_lstm_crf.jsonnet",
        ["tagging"],
        fixtures={
            **_paths("data/train.txt"),
            "data_loader.batch_sampler.batch_size": 2,
            "model.embedder.token_embedders.tokens.pretrained_file": REMOVED,
        },
        files={"data/train.txt": _CONLL},
    ),
    Project(
        "himkt/allennlp-optuna",
        "8d907e46e4424c8f0c67819c7cdef3a4a84e9698",
        "test_fixtures/config/classifier.jsonnet",
        ["allennlp_optuna"],
        variables={"dropout": "0.2", "embedding_dim": "8", "lr": "0.01"},
        predictor="text_classifier",
        sentence={"sentence": "I like a pan."},
    ),
    Project(
        "semantic-health/allennlp-multi-label",
        "2038ea8e0d441df9b953712383a4b1322cd40f55",
        "tests/fixtures/experiment.jsonnet",
        ["allennlp_multi_label"],
        fixtures={"data_loader.batch_sampler.batch_size": 1},
        changes=_CHECKPOINTS,
    ),
    Project(
        "JohnGiorgi/DeCLUTR",
        "b78ac5766d27e1a6cdfadd41cfd2bed57d2ac1c7",
        "tests/fixtures/experiment.jsonnet",
        ["declutr"],
        changes={**_CHECKPOINTS, "dataset_reader.lazy": REMOVED},
        note="`pip install pytorch-metric-learning`",
    ),
    Project(
        "allenai/allennlp-semparse",
        "751c25f5f59c4d7973f03dc05210f9f94752f1b5",
        "test_fixtures/nlvr_direct_semantic_parser/experiment.json",
        ["allennlp_semparse"],
        note="`pip install unidecode`",
    ),
    Project(
        "allenai/allennlp-guide",
        "f6cb02cd15a985c04c2a7979df6db6f9c3960401",
        "training_config/seq2seq_config.json",
        ["allennlp_models", "nla_semparse"],
        folder="nla_semparse",
        fixtures=_paths("data/small.tsv"),
        files={
            "data/small.tsv": "what is two plus one\t(add two one)\n"
            "three times two\t(multiply three two)\n" * 10
        },
    ),
    Project(
        "mhagiwara/realworldnlp",
        "b0bf2251f7255ebcfdfe6844354f006dc5b42278",
        "examples/sentiment/sst_classifier.jsonnet",
        ["examples.sentiment.sst_classifier", "allennlp_models.classification"],
        fixtures={**_paths("data/trees.txt"), "data_loader.batch_sampler.batch_size": 2},
        files={
            "data/trees.txt": "(4 (3 (2 A) (3 good)) (2 film))\n(0 (1 (2 A) (1 bad)) (2 film))\n"
            "(2 (2 (2 A) (2 plain)) (2 film))\n(4 (4 (2 So) (4 fine)) (2 .))\n" * 3
        },
        predictor="sentence_classifier_predictor",
        sentence={"sentence": "a good film"},
    ),
    Project(
        "himkt/allennlp-NER",
        "b37eb5d87b4ee5c204a1e9e6403e660bfa7fa703",
        "config/bilstm-crf.jsonnet",
        ["allennlp_ner", "allennlp_models.tagging"],
        changes=_CHECKPOINTS,
        fixtures={
            **_paths("data/eng.train"),
            "test_data_path": "data/eng.train",
            "data_loader.batch_size": 2,
            "model.text_field_embedder.token_embedders.tokens.pretrained_file": REMOVED,
        },
        files={"data/eng.train": _CONLL},
    ),
    Project(
        "Riccorl/transformer-srl",
        "d68cebd343beffd20d609c65b5b5d1b8bd08b695",
        "training_config/bert_tiny_span.jsonnet",
        ["transformer_srl"],
        changes=_CHECKPOINTS,
        fixtures=_paths("data/srl.txt"),
        variables={"SRL_TRAIN_DATA_PATH": "data/srl.txt", "SRL_VALIDATION_DATA_PATH": "-"},
        files={"data/srl.txt": _CONLL},
    ),
    Project(
        "dwadden/dygiepp",
        "b55dec4520a7f4cfa560db51ee32e9dd684e558b",
        "training_config/scierc_lightweight.jsonnet",
        ["dygie"],
        fixtures=_paths("dygie/tests/fixtures/scierc_article.json"),
    ),
]
