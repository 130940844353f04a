"""
Seeds that cost nothing: where no GPU has been used yet, PyTorch keeps for each that is set the
source lines of the stack that has set it, in each test, command and worker anew.

They are for the message of an error that a GPU raises later. To read and format them takes some
milliseconds, and takes more of them the deeper the stack.
"""

from types import SimpleNamespace

import torch.cuda

torch.cuda.traceback = SimpleNamespace(format_stack=list)
