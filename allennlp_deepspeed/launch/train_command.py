"""
Checks every training of this process before any data is read or any worker started, and starts the
workers of the "deepspeed" trainer with torch.distributed.elastic.

AllenNLP has no hook at this point, so `install` wraps `allennlp.commands.train.train_model`.
"""

import functools
import gc
import inspect
import multiprocessing
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Dict, Optional

from allennlp.commands import train as train_command
from allennlp.common import Params
from allennlp.models import Model

from allennlp_deepspeed.announcements import is_full_log_requested
from allennlp_deepspeed.config.global_batch import fill_batch_size, finds_micro_batch_size
from allennlp_deepspeed.config.json_types import is_integer
from allennlp_deepspeed.engine.process import worker_failure
from allennlp_deepspeed.launch import (
    addresses,
    error_messages,
    launcher_environment,
    nodes,
    preload,
    process_group,
    train_function,
    worker,
)
from allennlp_deepspeed.launch.agent import UNGUARDED, UNGUARDED_EXIT_CODE, run_workers
from allennlp_deepspeed.launch.config_check import (
    check,
    check_devices,
    has_deepspeed_trainer,
    worker_devices,
)
from allennlp_deepspeed.launch.console_lines import is_command, print_how_to_resume
from allennlp_deepspeed.launch.launcher_environment import LaunchedProcess
from allennlp_deepspeed.reports.console_handler import ConsoleSettings, shown_on_console
from allennlp_deepspeed_import_hook import process_setup

__all__ = ["check", "has_deepspeed_trainer", "install", "worker_devices"]


def install() -> None:
    """
    Wraps AllenNLP's `train_model`, so that the config is checked first. May be called more than
    once.
    """
    train_model = train_command.train_model
    if hasattr(train_model, "checks_deepspeed"):
        return
    # Without the import hook's check whether this package is imported.
    train_model = getattr(train_model, "without_package", train_model)

    @functools.wraps(train_model)
    def checked_train_model(params: Params, *args: Any, **kwargs: Any) -> Any:
        error_messages.check_type(params)
        normalize_sections(params)
        is_ours = has_deepspeed_trainer(params.as_dict(quiet=True))
        try:
            if not is_ours:
                check(params)
            else:
                arguments = inspect.signature(train_model).bind(params, *args, **kwargs).arguments
                return _train_ours(arguments)
        except Exception as error:
            error_messages.end_command_with(error, shortens_traceback=is_ours)
            raise
        return train_model(params, *args, **kwargs)

    checked_train_model.checks_deepspeed = True  # type: ignore[attr-defined]
    train_command.train_model = checked_train_model
    error_messages.install()


def normalize_sections(params: Params) -> None:
    """
    Replaces a name of a trainer or vocabulary by an object, which AllenNLP requires with several
    workers.

    # Parameters

    params : `Params`, required.
        A complete training configuration. It is changed in place.
    """
    for section in ("trainer", "vocabulary"):
        if isinstance(params.params.get(section), str):
            params.params[section] = {"type": params.params[section]}


def _train_ours(arguments: Dict[str, Any]) -> Any:
    """Checks the config, and trains."""
    _check_not_imported()
    if is_command():
        _exclude_imports_from_collections()
    process_setup.prepare()
    process = launcher_environment.detect()
    settings = _console_settings(arguments, process)
    with ExitStack() as stack:
        if process is None or process.local_rank == 0:
            stack.enter_context(print_how_to_resume(arguments))
        with shown_on_console(settings):
            config = _checked_config(arguments, process)
            returns_model = arguments.pop("return_model", None)
            if not nodes.has_workers(config):
                model = train_function.train(arguments, None)
                return None if returns_model is False else model
            if process is not None and launcher_environment.is_worker(config, process):
                return _train_as_worker(arguments, process)
            node = nodes.local_node(config, arguments.get("node_rank", 0))
            prefix = process_group.collectives_prefix(arguments["serialization_dir"])
            node = replace(node, collectives=prefix)
            run_workers(node, worker.run, dict(os.environ), arguments, settings)
    if not returns_model or arguments.get("dry_run"):
        return None
    return Model.load(arguments["params"], arguments["serialization_dir"])


def _check_not_imported() -> None:
    """
    Ends this process if it only imports the script that has started it. The script calls
    `train_model` without `if __name__ == "__main__":` then.
    """
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    if preload.IS_IN_SERVER:
        os._exit(UNGUARDED_EXIT_CODE)  # the agent reports it, once for all workers
    sys.exit(UNGUARDED)


@functools.cache  # once, because later there may be garbage
def _exclude_imports_from_collections() -> None:
    """Excludes imported modules from garbage collections, which take seconds at exit."""
    gc.freeze()


def _checked_config(
    arguments: Dict[str, Any], process: Optional[LaunchedProcess]
) -> Dict[str, Any]:
    """Returns the checked config, with the launcher's values and those derived from other keys."""
    params = arguments["params"]
    if process is not None:
        launcher_environment.fill_distributed(params, process, arguments)
    fill_derived_keys(params)
    check(params)
    check_devices(params.as_dict(quiet=True))
    config: Dict[str, Any] = params.as_dict(quiet=True)
    return config


def _train_as_worker(arguments: Dict[str, Any], process: LaunchedProcess) -> None:
    """Trains one rank in a process that a launcher has started."""
    distributed = arguments["params"].as_dict(quiet=True)["distributed"]
    address, port = distributed["primary_address"], distributed["primary_port"]
    if process.num_nodes == 1 and not process.has_store:
        address = addresses.LOOPBACK
    process = replace(process, address=address, port=port)
    worker.set_up_process(process)
    try:
        train_function.train(arguments, process)
    except Exception as error:
        failure = worker_failure.report(error)
        if process.serves_other_nodes:
            worker_failure.wait_for_readers(failure)
        if failure is not None:
            # A launcher that has its workers write error files prints what is in them.
            is_short = failure.is_consequence or worker_failure.has_error_file()
            error_messages.show_instead_of_traceback(
                error, failure.summary if is_short else str(failure)
            )
        raise


def fill_derived_keys(params: Params) -> None:
    """
    Sets keys that are derived from other keys.

    # Parameters

    params : `Params`, required.
        A complete training configuration. It is changed in place.
    """
    config = params.as_dict(quiet=True)
    if not has_deepspeed_trainer(config) or not finds_micro_batch_size(config["trainer"]):
        return
    distributed = config.get("distributed") or {}
    if not isinstance(distributed, dict):
        return
    devices, num_nodes = distributed.get("cuda_devices"), distributed.get("num_nodes", 1)
    has_workers = isinstance(devices, list) and devices and is_integer(num_nodes) and num_nodes > 0
    # Anything else the check refuses.
    if not distributed or has_workers:
        fill_batch_size(params.params, nodes.num_workers(config))


def _console_settings(
    arguments: Dict[str, Any], process: Optional[LaunchedProcess]
) -> Optional[ConsoleSettings]:
    """Returns the settings of the console, `None` if it shows the full log."""
    if is_full_log_requested():
        return None
    settings = ConsoleSettings.for_this_process(arguments.get("file_friendly_logging", False))
    # Of the processes of a launcher one shows on each node what they have in common.
    return settings._replace(is_shown=process is None or process.local_rank == 0)
