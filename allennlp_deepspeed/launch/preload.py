"""
Preloads the imports of workers in this package's fork server, which then ends with the process that
has started it. The server imports this module, after the package. It does nothing in other
processes, such as those that import all modules of the package.
"""

import gc
import importlib
import os
import signal

from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from allennlp_deepspeed.engine.process import interruption
from allennlp_deepspeed_import_hook import process_setup

STARTED_BY = "ALLENNLP_DEEPSPEED_FORK_SERVER_OF"
"""Is set for the server, to the number of the process that starts it."""

_HIDES = "ALLENNLP_DEEPSPEED_HIDES"

# Modules that workers import in addition to this package.
_MODULES = ("allennlp.commands", "torch._dynamo", "transformers.modeling_utils")

IS_IN_SERVER = os.environ.pop(STARTED_BY, None) == str(os.getppid())
"""Whether this process is the server, or forked from it."""

if IS_IN_SERVER:
    process_setup.prepare()
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    # Whoever signals all processes of a job, as a terminal does that is closed, means the workers.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            interruption.discard(number)
    for module in _MODULES:
        importlib.import_module(module)
    # Set for the imports alone. The workers' own values are those of the process that starts them.
    for name in os.environ.pop(_HIDES, "").split():
        del os.environ[name]
    # Collections in workers needn't look at what has been imported.
    gc.freeze()
