"""
Which ranks write what DeepSpeed saves once for several.
"""

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine import internals


def write_model_states(engine: DeepSpeedEngine, is_first_here: bool) -> None:
    """
    To be called by every rank before a checkpoint is saved. By itself DeepSpeed has rank 0 write,
    or with `use_node_local_storage` the workers whose device has the index 0.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    is_first_here : `bool`, required.
        Whether this rank writes what the ranks that share its directory have once. At stage 3 each
        has model states of its own.
    """
    if not engine.zero_optimization_partition_weights():
        internals.set_saves_model_states(engine, is_first_here)
