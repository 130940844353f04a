import argparse
import json
import logging
import sys
from typing import Any, Dict, List

from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from typing_extensions import override

from allennlp_deepspeed.commands.comparison import Comparison
from allennlp_deepspeed.commands.dry_run import DryRun
from allennlp_deepspeed.commands.estimate import only_warnings
from allennlp_deepspeed.commands.memory_estimate import Estimator
from allennlp_deepspeed.commands.trial import NUM_STEPS, Trial, lacking_memory
from allennlp_deepspeed.config.deepspeed_config import DeepSpeedConfig
from allennlp_deepspeed.config.schema_validation import AUTO, lookup
from allennlp_deepspeed.config.unset_values import configured_value
from allennlp_deepspeed.engine.lifecycle.model_state_memory import ModelStates
from allennlp_deepspeed.launch import error_messages
from allennlp_deepspeed.launch.config_check import (
    check,
    check_devices,
    has_deepspeed_trainer,
    settings_of,
)
from allennlp_deepspeed.launch.train_command import fill_derived_keys, normalize_sections

# The modules that log the sources of values that the file leaves unset.
_RESOLUTION = "allennlp_deepspeed.config"

_NUM_STEPS = "scheduler.params.total_num_steps"


def run(args: argparse.Namespace) -> None:
    """
    Refuses the configs that `allennlp train` would refuse, and on request those that fail in
    the first steps.
    """
    with only_warnings():
        params = error_messages.read(args.param_path, args.overrides)
        replaced = error_messages.replaced_sections(args.param_path, params.as_dict(quiet=True))
        try:
            _check(params)
            dry_run = DryRun(params)
            constructed = dry_run.run()
        except ConfigurationError as error:
            raise ConfigurationError("\n".join([error.message, *replaced])) from error
        states = None if dry_run.model is None else _states(params, dry_run)
    filled = _FilledValues()
    resolved = _resolved(params, filled)
    print(f"{args.param_path} is valid. Resolved DeepSpeed configuration:")
    print(json.dumps(resolved, indent=2), *filled.lines, sep="\n")
    print(constructed, *(f"Warning: {line}." for line in replaced), sep="\n", flush=True)
    config: Dict[str, Any] = params.as_dict(quiet=True)
    packages = getattr(args, "include_package", None) or []
    if not args.tries and not args.overfit:
        try:
            check_devices(config)
            if states is not None:
                for line in lacking_memory(config, states):
                    print(f"Warning: {line}.")
        except ConfigurationError as error:
            print(f"Not for this machine: {error.message}")
        unchecked = [] if args.compare else ["the first steps"]
        unchecked += [] if dry_run.metrics else ["names in 'validation_metric'"]
        if unchecked:
            print(f"Not checked without --try: {', and '.join(unchecked)}.")
    else:
        num_instances = resolved["train_batch_size"]
        states = states or _states(params, dry_run)
        trial = Trial(
            params, packages, num_instances, states, dry_run.vocabulary, args.steps or NUM_STEPS
        )
        if args.overfit:
            trial.overfit()
        else:
            trial.run()
    if args.compare:
        comparison = Comparison(params, packages, resolved, args.steps or 10, dry_run.vocabulary)
        if not comparison.run():
            sys.exit(1)


def _check(params: Params) -> None:
    """Checks the keys of a config as `allennlp train` does, and completes it."""
    normalize_sections(params)
    fill_derived_keys(params)
    check(params)
    if not has_deepspeed_trainer(params.as_dict(quiet=True)):
        raise ConfigurationError(
            "'trainer.type' isn't \"deepspeed\", and only configs with this trainer are checked: "
            'write it, or add -o \'{"trainer.type": "deepspeed"}\' to the command.'
        )


def _states(params: Params, dry_run: DryRun) -> ModelStates:
    return Estimator(params, model=dry_run.model).states_of_config()


class _FilledValues(logging.Handler):
    """
    Collects the log lines of the values that the resolution of a config fills, with their sources.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: List[str] = []

    @override
    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if _NUM_STEPS not in line:  # its value is a stand-in
            self.lines.append(line)


def _resolved(params: Params, filled: _FilledValues) -> Dict[str, Any]:
    """Returns DeepSpeed's configuration as it would be in training."""
    config: Dict[str, Any] = params.as_dict(quiet=True)
    deepspeed_config = DeepSpeedConfig.from_value(config["trainer"].get("deepspeed_config"))
    settings = settings_of(config, deepspeed_config, "<serialization-dir>")
    logger = logging.getLogger(_RESOLUTION)
    logger.addHandler(filled)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    resolved = deepspeed_config.resolve(settings)
    engine_config = resolved.engine_config
    # The engine itself doesn't count micro-batches.
    steps = resolved.num_gradient_accumulation_steps
    engine_config["gradient_accumulation_steps"] = steps
    engine_config["train_batch_size"] *= steps
    if resolved.finds_micro_batch_size:
        engine_config.update(gradient_accumulation_steps=AUTO, train_micro_batch_size_per_gpu=AUTO)
    is_filled = configured_value(deepspeed_config.config, _NUM_STEPS) is None
    if is_filled and lookup(engine_config, _NUM_STEPS) is not None:
        engine_config["scheduler"]["params"]["total_num_steps"] = "known after reading data"
    return engine_config
