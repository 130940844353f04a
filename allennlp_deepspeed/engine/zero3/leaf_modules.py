"""
Declares modules whose submodules ranks call unequally often, for example because of the lengths of
their sequences, as leaf modules of ZeRO stage 3.
"""

import logging
from typing import Any, Dict, List

import torch

from allennlp_deepspeed.deepspeed_api import set_z3_leaf_module

logger = logging.getLogger(__name__)

_GENERATION = "allennlp_models.generation"
_PARSERS = "allennlp_semparse.models"

# Each is called once for each batch, and calls its submodules once for each time step of a batch or
# of a beam search, or only for some batches.
_CLASSES = {
    "allennlp.models.multitask.MultiTaskModel",
    "allennlp.modules.augmented_lstm.AugmentedLstm",
    "allennlp.modules.elmo_lstm.ElmoLstm",
    f"{_GENERATION}.models.bart.Bart",
    f"{_GENERATION}.models.copynet_seq2seq.CopyNetSeq2Seq",
    f"{_GENERATION}.models.simple_seq2seq.SimpleSeq2Seq",
    f"{_GENERATION}.models.t5.T5",
    f"{_GENERATION}.modules.seq_decoders.auto_regressive.AutoRegressiveSeqDecoder",
    # Skips layers at random, which then have no backward pass.
    "allennlp_models.rc.modules.seq2seq_encoders.qanet_encoder.QaNetEncoder",
    f"{_PARSERS}.atis.atis_semantic_parser.AtisSemanticParser",
    f"{_PARSERS}.nlvr.nlvr_semantic_parser.NlvrSemanticParser",
    f"{_PARSERS}.text2sql_parser.Text2SqlParser",
    f"{_PARSERS}.wikitables.wikitables_semantic_parser.WikiTablesSemanticParser",
}


def declare(model: torch.nn.Module, section: Dict[str, Any]) -> None:
    """
    Makes ZeRO stage 3 gather the parameters of each such module of AllenNLP, of its model library,
    and of allennlp-semparse, together. Without this, a rank would gather parameters of a submodule
    more often than others and wait for them, or mismatch them with other parameters.

    # Parameters

    model : `torch.nn.Module`, required.
        A model that several ranks are about to shard.
    section : `Dict[str, Any]`, required.
        DeepSpeed's section "zero_optimization". If its "leaf_module" has "classes", these are all.
    """
    if "classes" in (section.get("leaf_module") or {}):
        return
    found: List[str] = []
    for module in model.modules():
        if any(_name(base) in _CLASSES for base in type(module).__mro__):
            set_z3_leaf_module(module, True)
            found.append(type(module).__name__)
    if found:
        logger.info(
            "ZeRO stage 3 gathers these modules as one, because ranks may call their submodules a "
            "different number of times: %s. The gradients of the model are therefore accumulated "
            "unsharded. 'trainer.deepspeed_config.zero_optimization.leaf_module', such as "
            '{"classes": []}, overrides this.',
            ", ".join(sorted(set(found))),
        )


def _name(class_: Any) -> str:
    return f"{class_.__module__}.{class_.__qualname__}"
