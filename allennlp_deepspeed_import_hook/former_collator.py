"""A data collator of transformers 4, where it was a class of its own."""

from dataclasses import dataclass

from transformers import DataCollatorForLanguageModeling


@dataclass
class DataCollatorForWholeWordMask(DataCollatorForLanguageModeling):
    """Masks all pieces of a word together."""

    whole_word_mask: bool = True
