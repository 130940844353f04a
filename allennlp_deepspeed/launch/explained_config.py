"""
DeepSpeed's configuration as a training would have it, with where each value comes from.
"""

from typing import Any, Dict, Iterator, List, NamedTuple, Tuple

from allennlp.common import Params
from pydantic import BaseModel

from allennlp_deepspeed.config.deepspeed_config import DeepSpeedConfig
from allennlp_deepspeed.config.open_values import recorded_sources
from allennlp_deepspeed.config.schema import Schema
from allennlp_deepspeed.config.schema_validation import AUTO
from allennlp_deepspeed.config.support import UNSUPPORTED
from allennlp_deepspeed.engine.offloaded_optimizers import optimizer_in_use
from allennlp_deepspeed.launch.config_check import settings_of

YOURS = "your file"
DEEPSPEED = "DeepSpeed's default"
_OURS = "this trainer's default"

_SERIALIZATION_DIR = "<serialization-dir>"

_STEPS = "the optimizer that steps"


class ExplainedValue(NamedTuple):
    """
    # Parameters

    path : `str`
        Of the key in DeepSpeed's schema, joined by dots. Or what else there is to say.
    value : `Any`
    source : `str`
        Where it comes from, in words.
    """

    path: str
    value: Any
    source: str


def explained(params: Params) -> List[ExplainedValue]:
    """
    # Parameters

    params : `Params`, required.
        A whole training configuration that has been checked.
    """
    config: Dict[str, Any] = params.as_dict(quiet=True)
    written = config["trainer"].get("deepspeed_config")
    deepspeed_config = DeepSpeedConfig.of(written)
    settings = settings_of(config, deepspeed_config, _SERIALIZATION_DIR)
    with recorded_sources() as sources:
        resolved = deepspeed_config.resolve(settings)
    engine_config = {
        **resolved.engine_config,
        # The engine itself counts no micro-batches.
        "gradient_accumulation_steps": resolved.num_gradient_accumulation_steps,
        "train_batch_size": resolved.engine_config["train_batch_size"]
        * resolved.num_gradient_accumulation_steps,
    }
    mine = dict(_leaves(written)) if isinstance(written, dict) else {}
    left_open = [path for path, value in mine.items() if value == AUTO]
    in_use = optimizer_in_use(config["trainer"].get("optimizer"), resolved)
    name = written if isinstance(written, str) else (written or {}).get("type", "")
    preset = dict(_leaves(deepspeed_config.preset))
    values = []
    for path, value in _leaves(engine_config):
        if path in _FOUND and resolved.finds_micro_batch_size:
            value, source = _FOUND[path][0] or value, _FOUND[path][1]
        elif path in sources and path in _KNOWN_LATER:
            value, source = "known when the data are read", _KNOWN_LATER[path]
        elif path in sources:
            source = sources[path]
        elif path in mine and mine[path] != AUTO:
            source = YOURS
        elif path in preset:
            source = f'preset "{name or "zero_2"}"'
        else:
            source = _COMPUTED.get(path, _OURS)
        values.append(ExplainedValue(path, value, source))
    values.append(ExplainedValue(_STEPS, in_use.name, in_use.source))
    known = {value.path for value in values}
    for path in left_open:
        *sections, key = path.split(".")
        if sections == ["optimizer", "params"] and path not in known and key in in_use.defaults:
            source = f'{in_use.name}\'s default, for "{AUTO}"'
            values.append(ExplainedValue(path, in_use.defaults[key], source))
    for default in _defaults(engine_config):
        if default.path in left_open:
            default = default._replace(source=f'{DEEPSPEED}, for "{AUTO}"')
        values.append(default)
    return values


# Of which `resolve` has a stand-in.
_KNOWN_LATER = {"scheduler.params.total_num_steps": "micro-batches x epochs / accumulation"}

# With accumulation "auto".
_FOUND = {
    "gradient_accumulation_steps": ("auto", "found in the first step: what is left of the batch"),
    "train_micro_batch_size_per_gpu": ("auto", "found in the first step: as large as fits"),
    "train_batch_size": ("", "from trainer.global_batch_size"),
}

_COMPUTED = {"train_batch_size": "micro-batch x accumulation x workers"}


def _defaults(engine_config: Dict[str, Any]) -> Iterator[ExplainedValue]:
    """What DeepSpeed adds in the sections that are there, as far as it can be written here."""
    for section, value in engine_config.items():
        model = _model(Schema, section)
        if not isinstance(value, dict) or model is None:
            continue
        for name, field in model.model_fields.items():
            key = field.alias or name
            is_there = name in value or key in value
            is_supported = f"{section}.{key}" not in UNSUPPORTED
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            if not is_there and is_supported and isinstance(default, (bool, int, float, str)):
                yield ExplainedValue(f"{section}.{key}", default, DEEPSPEED)


def _model(schema: Any, section: str) -> Any:
    field = schema.model_fields.get(section)
    annotations = (
        () if field is None else (field.annotation, *getattr(field.annotation, "__args__", ()))
    )
    return next((a for a in annotations if isinstance(a, type) and issubclass(a, BaseModel)), None)


def _leaves(value: Any, path: str = "") -> Iterator[Tuple[str, Any]]:
    for key, inner in value.items():
        where = f"{path}.{key}" if path else key
        if isinstance(inner, dict) and inner:
            yield from _leaves(inner, where)
        else:
            yield where, inner
