"""
Studies of this package: programs that compare, measure or break it, and write pages of what they
find. `python -m evidence` lists them.
"""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "evidence" / "results"
