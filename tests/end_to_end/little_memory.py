"""Include this to have no CPU memory that is free, as far as psutil tells."""

import psutil

from tests import fixtures  # noqa: F401  # what the configs name

_virtual_memory = psutil.virtual_memory

psutil.virtual_memory = lambda: _virtual_memory()._replace(available=0)
