import re
from pathlib import Path

from tests.fixtures.chat_tokenizer import chat_tokenizer

# What looks like a special token in a template.
_MARKER = re.compile(r"<[^<>\s'\"={}]+>|\[/?[A-Z]+\]")


def tokenizer_for(template: str, directory: Path) -> str:
    """Writes a tokenizer with a chat template and the special tokens in it to a directory."""
    markers = list(dict.fromkeys(["<s>", *_MARKER.findall(template)]))
    return chat_tokenizer(directory, template, additional_special_tokens=markers, bos_token="<s>")
