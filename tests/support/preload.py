"""What the fork server imports and goes through, so that a test's command starts at once."""

import contextlib
import gc
import os

gc.disable()  # it would take a sixth of the time of the imports

# Nor may it touch a GPU, which the processes forked from it could then not use.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import allennlp.commands  # noqa: E402, F401
import allennlp.modules.seq2seq_encoders  # noqa: E402, F401
import deepspeed  # noqa: E402, F401
import torch  # noqa: E402
from allennlp.common.util import import_module_and_submodules  # noqa: E402

from allennlp_deepspeed.processes import fingerprints  # noqa: E402
from tests.support import engine_imports, forked_memory, processor, seeding, warm_up  # noqa: E402, F401

# With transformers that it doesn't know, the server would pass over the error, and over all below.
with contextlib.suppress(ImportError):
    import peft  # noqa: F401

torch.set_num_threads(1)
# A process that was forked makes PyTorch's thread pool anew when it is first asked for, and aborts
# if the threads of a backward pass are the first, which ask at once.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
processor.describe_once()

# As AllenNLP's command does before anything else, and each worker again.
WHOLE_PACKAGES = ("allennlp", "allennlp_deepspeed", "tests.fixtures")
for package in WHOLE_PACKAGES:
    import_module_and_submodules(package, exclude={"allennlp.sanity_checks", "allennlp.tools"})

# Each process would read them again.
fingerprints.versions()

warm_up.go_through_all_but_training()

# What is here stays, and a collection in a process forked from it would copy all of it.
gc.collect()
gc.freeze()
forked_memory.prepare()
gc.enable()
# A training is over before it has left much, and looking for it after each 700 objects takes some
# hundredths of its time.
gc.set_threshold(20_000)
