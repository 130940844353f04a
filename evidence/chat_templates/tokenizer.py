import re
from pathlib import Path

from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from tests.fixtures.chat_tokenizer import chat_tokenizer

# What looks like a special token in a template.
_MARKER = re.compile(r"<[^<>\s'\"={}]+>|\[/?[A-Z]+\]")

BOS = "<s>"


def tokenizer_for(template: str, directory: Path, adds_bos: bool = False) -> str:
    """
    Writes a tokenizer with a chat template and the special tokens in it to a directory. It may
    begin each text with a token, unless it is told to add none, as for the text of a template.
    """
    markers = list(dict.fromkeys([BOS, *_MARKER.findall(template)]))
    name = chat_tokenizer(directory, template, additional_special_tokens=markers, bos_token=BOS)
    if adds_bos:
        tokenizer = AutoTokenizer.from_pretrained(name)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.bos_token_id)]
        )
        tokenizer.save_pretrained(name)
    return name
