"""
Puts the fault points into a run that includes it with `--include-package`, and that has a fault in
its environment.
"""

from tests.faults.points import Fault, FaultPoints, install

install(FaultPoints(Fault.of_environment()))
