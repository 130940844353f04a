"""
Has each rank write what it fails with to a file, in a run that includes it with
`--include-package`.
"""

from tests.faults.rank_errors import install

install()
