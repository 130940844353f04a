"""What the fork server imports once, so that a test's `allennlp` command starts at once."""

import allennlp.commands  # noqa: F401
import allennlp.modules.seq2seq_encoders  # noqa: F401
import deepspeed  # noqa: F401
import torch

import allennlp_deepspeed  # noqa: F401

torch.set_num_threads(1)
