"""
Tools of `make docs`: mkdocs calls `hooks`, griffe `docstrings`, and `check` and `search` test the
site that they built. They import nothing of the package, so that they need no PyTorch.
"""
