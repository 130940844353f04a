"""
What `make docs` needs besides the pages: mkdocs calls `hooks`, griffe `docstrings`, and `check`
looks at what they have built. Imports nothing of the package, so that it needs no PyTorch.
"""
