"""
The check of a whole config file against what `allennlp train` constructs from it.
"""

import json
from copy import deepcopy
from typing import Any, Dict, List, Optional, TypeGuard

from allennlp.commands.train import TrainModel
from allennlp.common.checks import ConfigurationError
from allennlp.data import DataLoader
from allennlp.models.archival import verify_include_in_archive
from allennlp.nn.parallel import DdpAccelerator
from allennlp.training.trainer import Trainer

from allennlp_deepspeed.config.findings import Findings
from allennlp_deepspeed.config.values import as_json, is_integer
from allennlp_deepspeed.signatures import walk
from allennlp_deepspeed.signatures.callers import Given
from allennlp_deepspeed.signatures.paths import missing_files
from allennlp_deepspeed.signatures.walk import Problem, Problems

# What the train command reads itself; all other keys are for the train loop. With the seeds that
# Python's, NumPy's and PyTorch's generators take.
_SEEDS = {
    "random_seed": None,
    "numpy_seed": range(2**32),
    "pytorch_seed": range(-(2**63), 2**64),
}
_OF_THE_COMMAND = ("distributed", "evaluation", "include_in_archive", *_SEEDS)

_GIVEN = Given().and_("serialization_dir", "local_rank", "ddp_accelerator")


def check(config: Dict[str, Any], findings: Findings) -> Dict[str, Any]:
    """
    # Parameters

    config : `Dict[str, Any]`, required.
        A whole training configuration.
    findings : `Findings`, required.
        Gets a line for each key of which AllenNLP's train command can't construct anything, or that
        it doesn't know. Where it can't be known whether it can, there is none.

    # Returns

    `Dict[str, Any]`
        A copy without these keys.
    """
    sound = deepcopy(config)
    for problem in _problems(config):
        _remove(sound, problem.path.split("."))
        if "." in problem.path:
            findings.refuse(problem.path, str(problem))
        else:
            # The name of a section is a word that other lines have, too.
            findings.add(str(problem))
    return sound


def _remove(config: Dict[str, Any], keys: List[str]) -> None:
    *sections, last = keys
    section: Any = config
    for key in sections:
        inner = section.get(key) if isinstance(section, dict) else None
        if not isinstance(inner, dict):
            # A name in the place of an object with this "type", or something in a list.
            last = key
            break
        section = inner
    if last != "trainer":
        section.pop(last, None)


def _problems(config: Dict[str, Any]) -> Problems:
    walk.import_named_classes(config)
    yield from _of_seeds(config)
    yield from _of_archive(config)
    yield from _of_distributed(config.get("distributed"))
    yield from _of_train_loop(config)
    yield from missing_files(config)


def _of_seeds(config: Dict[str, Any]) -> Problems:
    for key, possible in _SEEDS.items():
        value = config.get(key)
        if value is None:
            continue
        try:
            seed = int(value)  # as AllenNLP does
        except (TypeError, ValueError, OverflowError):
            yield Problem(key, f" is {as_json(value)}: must be an integer")
            continue
        if possible is not None and seed not in possible:
            yield Problem(key, f" is {seed}: must be from {possible[0]} to {possible[-1]}")


def _of_archive(config: Dict[str, Any]) -> Problems:
    names = config.get("include_in_archive")
    if names is None:
        return
    try:
        verify_include_in_archive(names)
    except ConfigurationError as error:
        yield Problem("include_in_archive", f": {error.message}")
    except TypeError:
        yield Problem("include_in_archive", f" is {as_json(names)}: must be a list of file names")


def _of_distributed(section: Any) -> Problems:
    if section is None:
        return
    if not isinstance(section, dict):
        text = f' is {as_json(section)}: must be an object, such as {{"cuda_devices": [0, 1]}}'
        yield Problem("distributed", text)
        return
    devices = section.get("cuda_devices")
    if not _are_devices(devices):
        is_missing = "is missing" if devices is None else f"is {as_json(devices)}"
        yield Problem(
            "distributed.cuda_devices",
            f" {is_missing}: must be a list of a GPU's number for each worker of a node, such as "
            "[0, 1], or of -1 for the CPU",
        )
    num_nodes = section.get("num_nodes", 1)
    if not _is_positive(num_nodes):
        yield Problem(
            "distributed.num_nodes", f" is {as_json(num_nodes)}: must be an integer, at least 1"
        )
    elif _are_devices(devices) and num_nodes * len(devices) < 2:
        yield Problem(
            "distributed.cuda_devices",
            f" is {as_json(devices)}, which is one worker: write one for each of several, or "
            "remove the section 'distributed'",
        )
    address = section.get("primary_address", "")
    if not isinstance(address, str):
        yield Problem("distributed.primary_address", f" is {as_json(address)}: must be a string")
    port = section.get("primary_port")
    if port is not None and (not is_integer(port) or not 0 <= port < 2**16):
        yield Problem(
            "distributed.primary_port", f" is {as_json(port)}: must be an integer from 1 to 65535"
        )
    accelerator = section.get("ddp_accelerator")
    if accelerator is not None:
        given = Given().and_("local_rank", "world_size", "cuda_device")
        path = "distributed.ddp_accelerator"
        yield from walk.problems(accelerator, DdpAccelerator, path, given)


def _are_devices(devices: Any) -> TypeGuard[List[int]]:
    return isinstance(devices, list) and bool(devices) and all(map(is_integer, devices))


def _of_train_loop(config: Dict[str, Any]) -> Problems:
    loop = {key: value for key, value in config.items() if key not in _OF_THE_COMMAND}
    if loop.get("validation_data_path") is None and loop.get("test_data_path") is None:
        # AllenNLP constructs none of it.
        loop.pop("validation_data_loader", None)
    for problem in walk.problems(loop, TrainModel, "", _GIVEN):
        yield _elsewhere(problem, config) or problem
    if config.get("distributed") is None:
        return
    for name in ("vocabulary", "data_loader", "validation_data_loader"):
        if isinstance(config.get(name), str):
            # AllenNLP asks it for its keys.
            instead = json.dumps({"type": config[name]})
            yield Problem(name, f' is "{config[name]}": with several workers write {instead}')


def _elsewhere(problem: Problem, config: Dict[str, Any]) -> Optional[Problem]:
    """What is said of a key of the top level that belongs into a section."""
    if not problem.is_unknown or "." in problem.path:
        return None
    for section, base in (("trainer", Trainer), ("data_loader", DataLoader)):
        if problem.path in walk.known_names(config.get(section), base):
            return Problem(problem.path, f" is no key of the top level: it belongs to '{section}'")
    return None


def _is_positive(value: Any) -> bool:
    return is_integer(value) and value > 0
