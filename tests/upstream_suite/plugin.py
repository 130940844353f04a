"""A pytest plugin that imports this package, as `--include-package` does, before any test."""

import allennlp_deepspeed  # noqa: F401
