"""The table of public projects: which commit, which config, and what they need."""

import json
from typing import Any, Dict, NamedTuple, Optional, Sequence

# The value of a change that removes a key.
REMOVED = object()

_EMBEDDERS = "model.text_field_embedder.token_embedders"
# The smallest stand-in of a hub's model.
_BERT = "epwalsh/bert-xsmall-dummy"
# A project's BART is a copy of that of allennlp-models, whose own must not be registered beside it.
_WITHOUT_MODELS = 'import sys\nsys.modules["allennlp_models"] = None'
# What wandb 0.19 has dropped, and wandb-allennlp calls.
_WANDB = (
    "import os, wandb\n"
    'wandb.sdk.wandb_settings._get_wandb_dir = lambda root: os.path.join(root, "wandb")'
)
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
    lines : `str`, optional (default = `""`)
        Python that its owner has to run before its packages are imported.
    gathers : `bool`, optional (default = `False`)
        Whether the loss of a worker is of all workers' batches. `gradient_descent` then has as
        many workers, instead of accumulating.
    limit : `str`, optional (default = `""`)
        Why it can't be trained. What fails is then no failure of this run.
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
    lines: str = ""
    gathers: bool = False
    limit: str = ""

    @property
    def title(self) -> str:
        return f"{self.repository}: {self.config}"


# AllenNLP 2.0 has put data loaders in the place of iterators.
_LOADER = {
    "iterator": REMOVED,
    "data_loader": {"batch_sampler": {"type": "bucket", "batch_size": 2}},
}


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
_TREES = (
    "(4 (3 (2 A) (3 good)) (2 film))\n(0 (1 (2 A) (1 bad)) (2 film))\n"
    "(2 (2 (2 A) (2 plain)) (2 film))\n(4 (4 (2 So) (4 fine)) (2 .))\n" * 3
)
_TAGGED = (
    "You###O must###B-deontic go###O\nShe###O may###B-epistemic come###O home###O\n"
    "It###O can###B-dynamic swim###O\nWe###O left###O\n" * 2
)
_QUESTIONS = "".join(
    json.dumps(
        {
            "composed_question_text": f"Who is the {a} of the {b} ?",
            "component_question_texts": [f"Who is the {b} ?", f"[[CQS]] 0 [[CQE]] >> {a}"],
        }
    )
    + "\n"
    for a in ("wife", "son", "boss")
    for b in ("king", "pope")
)
_UPOS = "".join(
    f"1\t{first}\t_\tPROPN\n2\t{verb}\t_\tVERB\n3\t.\t_\tPUNCT\n\n"
    for first, verb in (("ann", "left"), ("bob", "ran"), ("cem", "saw"), ("dan", "sat"))
)
_ARTICLES = json.dumps(
    {
        f"19{number}": {
            "title": "A title",
            "abstract": "The abstract.",
            "full_text": [{"section_name": "Method", "paragraphs": ["A seed.", f"Used {number}."]}],
            "qas": [
                {
                    "question": "What is used?",
                    "question_id": f"q{number}",
                    "answers": [
                        {
                            "answer": {
                                "unanswerable": False,
                                "extractive_spans": [],
                                "yes_no": None,
                                "free_form_answer": "a seed",
                                "evidence": ["A seed."],
                                "highlighted_evidence": ["seed"],
                            }
                        }
                    ],
                }
            ],
        }
        for number in range(4)
    }
)
_ABSTRACTS = "".join(
    json.dumps(
        {
            "doc_key": key,
            "sentences": [["We", "use", method, "for", task, "."], ["It", "works", "."]],
            "ner": [[[2, 2, "Method"], [4, 4, "Task"]], []],
            "relations": [[[2, 2, 4, 4, "USED-FOR"]], []],
            "clusters": [[[2, 2], [6, 6]]],
        }
    )
    + "\n"
    for key, method, task in (
        ("A", "trees", "parsing"),
        ("B", "graphs", "tagging"),
        ("C", "beams", "search"),
        ("D", "flows", "tracking"),
    )
)
_SRL = (
    "#begin document (bn/a); part 000\n"
    + "".join(
        f"bn/a 0 0 {first} NNP (TOP(S(NP*) - - - - * (ARG0*) -\n"
        f"bn/a 0 1 {verb} VBD (VP*) {verb} 01 1 - * (V*) -\n"
        "bn/a 0 2 . . *)) - - - - * * -\n\n"
        for first, verb in (("Ann", "left"), ("Bob", "ran"), ("Cem", "saw"), ("Dan", "sat"))
    )
    + "#end document\n"
)

_SUMMARIES = "".join(
    json.dumps({"text": f"The {a} saw a {b} . It ran .", "title": f"{a} sees {b}"}) + "\n"
    for a in ("cat", "dog", "fox")
    for b in ("bird", "fish")
)
_PARSED = "# newdoc id = GUM_news_1\n" + "".join(
    f"1\t{first}\t_\tPROPN\tNNP\t_\t2\tnsubj\t_\tBeginSeg=Yes\n"
    f"2\t{verb}\t_\tVERB\tVBD\t_\t0\troot\t_\t_\n"
    "3\twhen\t_\tSCONJ\tWRB\t_\t4\tmark\t_\tBeginSeg=Yes\n"
    "4\tasked\t_\tVERB\tVBN\t_\t2\tadvcl\t_\t_\n\n"
    for first, verb in (("Ann", "left"), ("Bob", "ran"), ("Cem", "saw"), ("Dan", "sat"))
)
_UD_READER = {
    "type": "embur_conllu",
    "huggingface_tokenizer_path": _BERT,
    "token_indexers": {
        "tokens": {"type": "pretrained_transformer_mismatched", "model_name": _BERT}
    },
}
_FRAMES = "".join(
    json.dumps(
        {
            "tokens": [first, verb, "a", "cup", "."],
            "annotations": [
                {
                    "span": [1, 1],
                    "label": frame,
                    "children": [
                        {"span": [0, 0], "label": "Agent"},
                        {"span": [2, 3], "label": "Theme"},
                    ],
                }
            ],
            "meta": {"fully_annotated": True, "type": "full text"},
        }
    )
    + "\n"
    for first, verb, frame in (
        ("Ann", "took", "Taking"),
        ("Bob", "sold", "Selling"),
        ("Cem", "took", "Taking"),
        ("Dan", "sold", "Selling"),
    )
)
_PROGRAMS = "".join(
    json.dumps({"qid": f"q{n}", "source": f"What is {n}", "target": f"find {n}"}) + "\n"
    for n in ("two", "three", "four", "five")
)
_ARFF = (
    "@relation tiny\n@attribute a numeric\n@attribute b numeric\n@attribute c numeric\n"
    "@attribute x {0,1}\n@attribute y {0,1}\n@attribute z {0,1}\n@data\n"
    + "0.1,0.5,0.9,1,1,0\n0.9,0.2,0.1,1,0,1\n0.4,0.4,0.8,1,1,0\n0.7,0.1,0.3,1,0,1\n"
    * 2
)
_OPINIONS = "".join(
    json.dumps(
        {
            "doc_key": noun,
            "sentences": [["The", noun, "is", adjective, "."]],
            "ner": [[[1, 1, "TARGET"], [3, 3, "OPINION"]]],
            "relations": [[[1, 1, 3, 3, label]]],
        }
    )
    + "\n"
    for noun, adjective, label in (
        ("food", "good", "POS"),
        ("staff", "rude", "NEG"),
        ("soup", "fine", "POS"),
        ("tea", "cold", "NEG"),
    )
)
_RELATIONS = "".join(
    json.dumps({"id": a, "tokens": [a, verb, b, "."], "entities": [[0, 1], [2, 3]], "label": label})
    + "\n"
    for a, verb, b, label in (
        ("fire", "causes", "smoke", "Cause-Effect"),
        ("wheel", "of", "car", "Component-Whole"),
        ("rain", "causes", "mud", "Cause-Effect"),
        ("roof", "of", "house", "Component-Whole"),
    )
)
_GAMES = "".join(
    json.dumps({"subject": subject, "question": f"Is it {adjective}?", "majority": answer}) + "\n"
    for subject in ("snow", "coal")
    for adjective, answer in (("cold", True), ("black", False), ("old", True))
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
        note='`pip install allennlp-optuna "optuna<4" importlib-metadata`',
    ),
    Project(
        "semantic-health/allennlp-multi-label",
        "2038ea8e0d441df9b953712383a4b1322cd40f55",
        "tests/fixtures/experiment.jsonnet",
        ["allennlp_multi_label"],
        fixtures={
            "data_loader.batch_sampler.batch_size": 1,
            "trainer.use_amp": False,
            # Those of its own have a label that isn't in the training data.
            "validation_data_path": "tests/fixtures/data/reuters-21578/train.jsonl",
        },
        changes={**_CHECKPOINTS, "data_loader.num_workers": REMOVED},
    ),
    Project(
        "JohnGiorgi/DeCLUTR",
        "b78ac5766d27e1a6cdfadd41cfd2bed57d2ac1c7",
        "tests/fixtures/experiment.jsonnet",
        ["declutr"],
        changes={
            **_CHECKPOINTS,
            "dataset_reader.lazy": REMOVED,
            "data_loader.num_workers": REMOVED,
        },
        lines="from allennlp.modules.token_embedders import PretrainedTransformerEmbedder\n"
        "PretrainedTransformerEmbedder.eval_mode = False",
        fixtures={
            "data_loader.batch_size": 2,
            "trainer.run_confidence_checks": False,
        },
        gathers=True,
        note="`pip install pytorch-metric-learning validators`",
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
        files={"data/trees.txt": _TREES},
        predictor="sentence_classifier_predictor",
        sentence={"sentence": "a good film"},
    ),
    Project(
        "himkt/allennlp-NER",
        "b37eb5d87b4ee5c204a1e9e6403e660bfa7fa703",
        "config/bilstm-crf.jsonnet",
        ["allennlp_ner", "allennlp_models.tagging"],
        changes={**_CHECKPOINTS, "type": "deepspeed"},
        fixtures={
            **_paths("data/eng.train"),
            "test_data_path": "data/eng.train",
            "data_loader.batch_size": 2,
            f"{_EMBEDDERS}.token_characters.embedding.vocab_namespace": "token_characters",
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
        fixtures={**_paths("data/srl"), "data_loader.batch_sampler.batch_size": 2},
        variables={"SRL_TRAIN_DATA_PATH": "data/srl", "SRL_VALIDATION_DATA_PATH": "-"},
        files={"data/srl/all.gold_conll": _SRL},
    ),
    Project(
        "dwadden/dygiepp",
        "b55dec4520a7f4cfa560db51ee32e9dd684e558b",
        "training_config/scierc_lightweight.jsonnet",
        ["dygie"],
        changes={**_CHECKPOINTS, "data_loader": {"batch_size": 1, "shuffle": True}},
        fixtures={
            **_paths("data/abstracts.json"),
            "test_data_path": "data/abstracts.json",
        },
        files={"data/abstracts.json": _ABSTRACTS},
    ),
    Project(
        "allenai/allennlp-template-python-script",
        "e5c66e9b90d5855919f645899a8ee3900ae500c5",
        "config.jsonnet",
        ["my_project"],
        files={
            "config.jsonnet": """{
    dataset_reader: {type: "classification-tsv"},
    train_data_path: "tests/fixtures/toy_data.tsv",
    validation_data_path: self.train_data_path,
    model: {
        type: "simple_classifier",
        embedder: {token_embedders: {tokens: {type: "embedding", embedding_dim: 10}}},
        encoder: {type: "bag_of_embeddings", embedding_dim: 10}
    },
    data_loader: {batch_size: 1, shuffle: true},
    trainer: {optimizer: "adam"}
}"""
        },
        note="a config instead of its script, which makes objects by hand",
    ),
    Project(
        "allenai/allennlp-guide",
        "f6cb02cd15a985c04c2a7979df6db6f9c3960401",
        "my_text_classifier_bert.jsonnet",
        ["my_text_classifier"],
        folder="quick_start",
        fixtures={
            **_paths("data/small.tsv"),
            "data_loader.batch_size": 2,
            "dataset_reader.tokenizer.model_name": _BERT,
            "dataset_reader.token_indexers.bert.model_name": _BERT,
            "model.embedder.token_embedders.bert.model_name": _BERT,
            "model.encoder.pretrained_model": _BERT,
        },
        files={"data/small.tsv": "a good film\tpos\na bad film\tneg\nso dull\tneg\n" * 2},
        predictor="sentence_classifier",
        sentence={"sentence": "a very good movie"},
    ),
    Project(
        "allenai/qasper-led-baseline",
        "afd0fb96bf78ce8cd8157639c6f6a6995e4f9089",
        "fixtures/qasper_baseline.jsonnet",
        ["qasper_baselines"],
        fixtures={
            "model.attention_window_size": 16,
            "trainer.run_confidence_checks": False,
            **_paths("data/articles.json"),
            "dataset_reader.max_document_length": 256,
            "validation_dataset_reader.max_document_length": 256,
        },
        files={"data/articles.json": _ARTICLES},
    ),
    Project(
        "OnlpLab/Modality",
        "9c7185b181a6f8b36b7b24ef3cab2d82097fecd9",
        "experiments/tagging_crf.jsonnet",
        ["my_library"],
        fixtures={
            **_paths("data/tagged.txt"),
            "data_loader.batch_sampler.batch_size": 2,
            "dataset_reader.token_indexers.tokens.model_name": _BERT,
            "model.text_field_embedder.token_embedders.tokens.model_name": _BERT,
            "model.encoder.input_dim": 20,
        },
        files={"data/tagged.txt": _TAGGED},
    ),
    Project(
        "StonyBrookNLP/musique",
        "922ac98f19a201998dbdae6d7f2887a5258dbdeb",
        "experiment_configs/execution_model_decomposer_for_musique_ans_and_full.jsonnet",
        ["allennlp_lib"],
        fixtures={
            **_paths("data/questions.jsonl"),
            "data_loader.batch_size": 2,
            "dataset_reader.transformer_model_name": "sshleifer/bart-tiny-random",
            "model.model_name": "sshleifer/bart-tiny-random",
            "model.max_steps": 5,
            "model.beam_size": 2,
            "trainer.run_confidence_checks": False,
        },
        lines=_WITHOUT_MODELS,
        files={"data/questions.jsonl": _QUESTIONS},
    ),
    Project(
        "machamp-nlp/machamp",
        "51b4bfd88e376e2e078561f5a8a80c392281e001",
        "config.jsonnet",
        ["machamp"],
        files={
            "config.jsonnet": """local params = import "configs/params.json";
params + {
    train_data_path: "TRAINPLACEHOLDER",
    validation_data_path: "DEVPLACEHOLDER",
    dataset_reader+: {datasets: {UD: {
        train_data_path: "data/ud.txt", validation_data_path: "data/ud.txt", word_idx: 1,
        tasks: {upos: {task_type: "seq", column_idx: 3}}
    }}},
    model+: {
        decoders: {upos: params.model.decoders.default + params.model.decoders.seq + {
            dataset_embeds_dim: 0, task: "upos", order:: 1
        }},
        tasks: ["upos"],
        task_types: ["seq"]
    }
}""",
            "data/ud.txt": _UPOS,
        },
        fixtures={
            "dataset_reader.token_indexers.tokens.model_name": _BERT,
            "dataset_reader.tokenizer.model_name": _BERT,
            "model.text_field_embedder.token_embedders.tokens.model_name": _BERT,
            "model.encoder.embedding_dim": 20,
            "model.decoders.upos.input_dim": 20,
        },
        changes={
            **_CHECKPOINTS,
            "model.default_max_sents": REMOVED,
            "vocabulary.min_count": REMOVED,
            "trainer.learning_rate_scheduler.gradual_unfreezing": REMOVED,
            "data_loader.batch_sampler": {"type": "bucket", "batch_size": 2},
        },
        note="a config instead of its script, which merges the two files: "
        "`machamp.util.merge_configs` does it too",
    ),
    Project(
        "gabeorlanski/allennlp-hydra",
        "92ccc7e1e9b0f75ed1ee68467b06141c85104f64",
        "test_fixtures/expected_configs/simple_tagger.jsonnet",
        ["allennlp_hydra"],
        files={"data/tagged.tsv": _TAGGED},
        fixtures={
            **_paths("data/tagged.tsv"),
            "data_loader.batch_sampler.batch_size": 2,
            # Otherwise an update is lost in rounding.
            "trainer.optimizer.lr": 1.0,
        },
        note="`pip install hydra-core omegaconf`",
    ),
    Project(
        "altescy/xallennlp",
        "348ed221a56acea9441b924890d1d158cefa6247",
        "tests/fixtures/configs/basic_classifier.jsonnet",
        ["xallennlp"],
        fixtures={
            "data_loader.batch_sampler.batch_size": 2,
            "model.seq2vec_encoder.ngram_filter_sizes": [2, 3],
        },
        changes={"trainer.checkpointer": REMOVED},
        variables={"MLFLOW_TRACKING_URI": "file:mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"},
        note="`pip install flatten_dict mlflow fasttext-wheel`",
    ),
    Project(
        "kajyuuen/allennlp-book",
        "e3df88ef284e24e5ae0d9cfa3527c255c05a25e6",
        "src/tests/fixtures/configs/experiment.jsonnet",
        ["src"],
        folder="ner-model",
        fixtures=_paths("data/conll.txt"),
        files={"data/conll.txt": _CONLL},
        changes={
            **_LOADER,
            "model.word_embeddings": {
                "token_embedders": {"tokens": {"type": "embedding", "embedding_dim": 6}}
            },
        },
    ),
    Project(
        "kajyuuen/allennlp-book",
        "e3df88ef284e24e5ae0d9cfa3527c255c05a25e6",
        "configs/simple_seq2seq.jsonnet",
        ["allennlp_models.generation"],
        folder="seq2seq",
        fixtures=_paths("data/dates.tsv"),
        files={"data/dates.tsv": "May 1\t5-1\nJune 2\t6-2\nJuly 3\t7-3\n" * 2},
        changes={
            **_LOADER,
            "dataset_reader.start_symbol": "^",
            "dataset_reader.end_symbol": "$",
        },
    ),
    Project(
        "shanest/allennlp-bert-example",
        "98f548ab2763bbbae78e00d679df5b8f527dd88f",
        "classifying_experiment.jsonnet",
        ["classifying"],
        fixtures={
            **_paths("data/trees.txt"),
            "data_loader.batch_size": 2,
            "dataset_reader.tokenizer.model_name": _BERT,
            "dataset_reader.token_indexers.tokens.model_name": _BERT,
            "model.embedder.token_embedders.tokens.model_name": _BERT,
            "model.pooler.embedding_dim": 20,
        },
        files={"data/trees.txt": _TREES},
    ),
    Project(
        "shunk031/allennlp-NER-ja",
        "9330e98b9274b9dbfadfae45a34bcf4b722fb617",
        "configs/stockmark-ner-wiki/bert.jsonnet",
        ["allennlp_ner_ja", "allennlp_models.tagging"],
        fixtures={
            **_paths("data/ner.txt"),
            "test_data_path": "data/ner.txt",
            "data_loader.batch_sampler.batch_size": 2,
            "dataset_reader.token_indexers.tokens.model_name": _BERT,
            "model.text_field_embedder.token_embedders.tokens.model_name": _BERT,
            "model.encoder.input_dim": 20,
            "trainer.callbacks": ["track_epoch_callback"],
        },
        changes={"type": "deepspeed"},
        variables={"GPU": "-1"},
        files={"data/ner.txt": _CONLL},
        note="`pip install fugashi kyoto-reader pyknp`",
    ),
    Project(
        "dhruvdcoder/wandb-allennlp",
        "99ffb013fb38eb26a9641be4cc3f4f5e361d2582",
        "configs/parameter_tying_v1.0.0.jsonnet",
        ["wandb_allennlp", "models"],
        folder="tests",
        fixtures={"model.d": 1},
        changes={"evaluate_on_test": REMOVED},
        lines=f'import sys\nsys.path.insert(0, "../src")\n{_WANDB}',
        variables={
            "DATA_PATH": "data",
            "WANDB_MODE": "offline",
            "a": "0.1",
            "bool_value": "true",
            "int_value": "3",
            "call_finish_on_end": "true",
        },
        note="`pip install shortuuid`; wandb 0.19 has dropped `_get_wandb_dir`",
    ),
    Project(
        "IlyaGusev/summarus",
        "525040ee80f7e8d9763af47776f0b25e5434836b",
        "training_configs/cnndm_pgn.jsonnet",
        ["summarus.models"],
        # The config's own passes an argument that its base class doesn't have any more.
        fixtures={"dataset_reader.type": "ria"},
        changes={
            **_LOADER,
            "dataset_reader.tokenizer": "whitespace",
            "trainer.shuffle": REMOVED,
        },
        variables={"TRAIN_DATA_PATH": "data/news.jsonl", "VAL_DATA_PATH": "data/news.jsonl"},
        files={"data/news.jsonl": _SUMMARIES},
        note="`pip install razdel beautifulsoup4`",
    ),
    Project(
        "gucorpling/DisCoDisCo",
        "66b8c4e86543f0a14913f4b57f454be80e3bfba5",
        "configs/seg/baseline/bert_baseline.jsonnet",
        ["gucorpling_models"],
        fixtures={
            "data_loader.batch_size": 2,
            "model.embedder.token_embedders.fasttext.pretrained_file": REMOVED,
        },
        # Its other models need flair 0.7 and xgboost.
        lines="import sys\nfrom unittest import mock\n"
        'flair = [f"flair.{name}" for name in ("data", "datasets", "embeddings", "models")]\n'
        'sys.modules.update((name, mock.MagicMock()) for name in ["flair", "xgboost", *flair])',
        variables={
            "EMBEDDING_MODEL_NAME": _BERT,
            "EMBEDDING_DIMS": "20",
            "USE_CRF": "1",
            "FASTTEXT_EMBEDDING_FILE": "",
            "TRAIN_DATA_PATH": "data/eng.rst.gum.conllu",
            "VALIDATION_DATA_PATH": "data/eng.rst.gum.conllu",
        },
        files={"data/eng.rst.gum.conllu": _PARSED},
    ),
    Project(
        "studio-ousia/luke",
        "251654548a15b9a8ddc708a53b715bdf3a112102",
        "examples/ner/configs/transformers.jsonnet",
        ["examples.ner", "examples.utils.learning_rate_schedulers"],
        variables={
            "TRANSFORMERS_MODEL_NAME": _BERT,
            "TRAIN_DATA_PATH": "data/ner.txt",
            "VALIDATION_DATA_PATH": "data/ner.txt",
        },
        files={"data/ner.txt": _CONLL},
        note="`pip install seqeval`",
    ),
    Project(
        "lgessler/microbert",
        "d9c1e9fa9fc13071992a054e67b567a53995681b",
        "configs/bert_pretrain.jsonnet",
        ["embur.schedulers", "allennlp_models"],
        fixtures={"data_loader.instances_per_epoch": 16, "data_loader.scheduler.batch_size": 2},
        changes={"model.backbone.position_embedding_type": "absolute"},
        variables={
            "NUM_LAYERS": "2",
            "EMBEDDING_DIM": "20",
            "NUM_ATTENTION_HEADS": "2",
            "TOKENIZER_PATH": _BERT,
            "readers": json.dumps(dict.fromkeys(("xpos", "mlm", "parser"), _UD_READER)),
            **dict.fromkeys(
                ("train_data_paths", "dev_data_paths"),
                json.dumps(dict.fromkeys(("xpos", "mlm", "parser"), "data/ud.conllu")),
            ),
            **dict.fromkeys(("XPOS", "MLM", "PARSER"), "true"),
        },
        files={"data/ud.conllu": _PARSED},
        limit="it calls `_whole_word_mask` of a collator of transformers 4, a private method: copy "
        "that, and write `mask_tokens` with it; positions of kind `relative_key` are gone",
    ),
    Project(
        "hiaoxui/span-finder",
        "ad9ed403c69a985254691ad6b13b5dbc7121fcf9",
        "config/fn.jsonnet",
        ["sftp"],
        fixtures={"data_loader.batch_sampler.max_tokens": 16},
        changes={"type": "deepspeed"},
        lines="from allennlp.modules import ConditionalRandomField as Crf\n"
        "computed = Crf._input_likelihood\n"
        "Crf._input_likelihood = lambda self, logits, *rest: computed("
        "self, logits, *[self.transitions][len(rest) - 1 :], *rest)",
        variables={"DATA_PATH": "data", "ONTOLOGY_PATH": "", "ENCODER": _BERT, "CUDA": "[-1]"},
        files={f"data/{name}.jsonl": _FRAMES for name in ("train", "dev", "test")},
        note="`pip install concrete pycountry`",
    ),
    Project(
        "benbogin/unobserved-local-structures",
        "ae0d746eef1375bf9301f147da88c74676df0be2",
        "configs/base.jsonnet",
        ["src"],
        folder="experiments",
        fixtures={
            **_paths("data/all.jsonl", "@data/all.jsonl"),
            **dict.fromkeys(
                (
                    "dataset_reader.source_tokenizer.model_name",
                    "dataset_reader.source_token_indexers.tokens.model_name",
                    "model.model_name",
                ),
                "facebook/bart-base",
            ),
            "data_loader.batch_sampler.batch_size": 1,
            "model.max_decoding_steps": 5,
            # It would keep no checkpoint that a run is recovered from.
            "trainer.checkpointer": REMOVED,
        },
        lines=_WITHOUT_MODELS,
        files={"data/all.jsonl": _PROGRAMS},
    ),
    Project(
        "iesl/box-mlc-iclr-2022",
        "15439b7e46885458d0c45d530c17f1deac0398f8",
        "best_models_configs/reported-cellcycle_fun_mbm-test/config.json",
        ["box_mlc"],
        fixtures={
            **_paths("data/train.arff"),
            "test_data_path": "data/train.arff",
            "dataset_reader.num_labels": 3,
            "validation_dataset_reader.num_labels": 3,
            "model.feedforward.input_dim": 3,
            "model.feedforward.hidden_dims": [16, 16, 16],
            "model.label_embeddings.embedding_dim": 16,
            "model.constraint_violation.hierarchy_reader.filepath": "data/tree.edgelist",
        },
        changes={
            "type": "deepspeed",
            "trainer.checkpointer.type": REMOVED,
            # That of Weights & Biases is for one process.
            "trainer.callbacks": ["track_epoch_callback"],
        },
        lines=_WANDB,
        variables={"WANDB_MODE": "offline"},
        files={"data/train.arff": _ARFF, "data/tree.edgelist": "y x {}\nz x {}\n"},
        note="`pip install scikit-multilearn liac-arff wcmatch wandb-allennlp==0.3.1 "
        "git+https://github.com/dhruvdcoder/box-embeddings`",
    ),
    Project(
        "chiayewken/Span-ASTE",
        "b252f8b1e4026de26838f00de6257a0849951e67",
        "training_config/config.jsonnet",
        ["span_model"],
        fixtures={
            **_paths("data/train.json"),
            "test_data_path": "data/train.json",
            "dataset_reader.token_indexers.bert.model_name": _BERT,
            "model.embedder.token_embedders.bert.model_name": _BERT,
        },
        changes={**_CHECKPOINTS, "data_loader": {"batch_size": 1, "shuffle": True}},
        files={"data/train.json": _OPINIONS},
    ),
    Project(
        "eladsegal/strategyqa",
        "1ba1e97452e189569357876f2854b01357ffbe37",
        "configs/for_STAR/1_twentyquestions.jsonnet",
        ["src"],
        fixtures={
            **_paths("data/games.jsonl"),
            **dict.fromkeys(
                (
                    "model.pretrained_model",
                    "model.tokenizer_wrapper.pretrained_model",
                    "dataset_reader.tokenizer_wrapper.pretrained_model",
                    "validation_dataset_reader.tokenizer_wrapper.pretrained_model",
                ),
                _BERT,
            ),
            "data_loader.batch_sampler.batch_size": 1,
            "model.transformer_weights_path": REMOVED,
        },
        changes=_CHECKPOINTS,
        lines='import nltk\nnltk.data.path.append("nltk_data")',
        variables={"DROP_WEIGHTS": ""},
        files={"data/games.jsonl": _GAMES, "nltk_data/corpora/stopwords/english": "the\n"},
    ),
    Project(
        "DFKI-NLP/RelEx",
        "0826c02f793b78bf8b7b7001c2e3fdfdb25c1ad2",
        "configs/relation_classification/semeval/baseline_cnn.jsonnet",
        ["relex"],
        fixtures={
            **_paths("data/train.jsonl"),
            "dataset_reader.type": "semeval2010_task8",
            "model.text_encoder.ngram_filter_sizes": [2, 3],
            "model.classifier_feedforward.input_dim": 300,
            "model.classifier_feedforward.hidden_dims": [2],
        },
        changes={
            **_LOADER,
            "trainer.num_serialized_models_to_keep": REMOVED,
            "model.text_field_embedder": {
                "token_embedders": {"tokens": {"type": "embedding", "embedding_dim": 300}}
            },
            "model.word_dropout": 0.0,
            "model.regularizer": {
                "regexes": [["text_encoder.conv_layer_.*weight", {"type": "l2", "alpha": 1e-5}]]
            },
        },
        files={"data/train.jsonl": _RELATIONS},
    ),
    Project(
        "allenai/sequential_sentence_classification",
        "cf5ad6c663550dd8203f148cd703768d9ee86ff4",
        "sequential_sentence_classification/config.jsonnet",
        ["sequential_sentence_classification"],
        limit="AllenNLP 0.9: remove the unused import of `SimpleWordSplitter`; in the model write "
        '`sentences["bert"]["token_ids"]`, `num_wrapping_dims=1` for its embedder and '
        '`metric_val["f1"]`; in the config `pretrained_transformer` for `bert-pretrained`, '
        "`data_loader` for `iterator`, `huggingface_adamw` for `bert_adam`, and numbers and "
        "booleans for their strings",
    ),
    Project(
        "allenai/aiconf-allennlp-tutorial",
        "5d7a4a189dbab61e175019202fc54d6b20e07cbd",
        "aiconf/fixtures/experiment.json",
        ["aiconf"],
        changes=_LOADER,
        limit="its reader and its model are exercises, without code",
    ),
    Project(
        "jacobdanovitch/allennlp_ranking_guide",
        "2c3b0c3f5d02a6ee73432eb516be11dd9643a855",
        "experiments/mimics.jsonnet",
        ["allenrank"],
        limit="a module of the project isn't in its repository: remove its import from "
        "allenrank.predictors",
    ),
    Project(
        "cjber/sprl_allennlp",
        "73dbe52dc515fa78f486eff31b406f6d14a97e31",
        "configs/fg_ner.jsonnet",
        ["ent_model"],
        limit="spaCy 3 has `spacy.training.iob_utils` in the place of `spacy.gold`",
    ),
    Project(
        "shunk031/allennlp-dataframe-mapper",
        "721113dcfc6a2ba04ce100223b6a3a56a215c825",
        "test_fixtures/mapper/mapper_iris.jsonnet",
        ["allennlp_dataframe_mapper"],
        limit='sklearn-pandas needs `pip install "scikit-learn<1.6"`; it has no trainer',
    ),
]
