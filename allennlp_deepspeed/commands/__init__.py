"""
The `allennlp deepspeed` command.
"""

from allennlp_deepspeed.commands.deepspeed import DeepSpeed

__all__ = ["DeepSpeed"]
