"""All types of causal language models that transformers has, shrunken, beside a plain loop."""
