"""
What of a run is on disk, there and back. Imports `engine`, `optimizers`, `lora` and the rooms
below.
"""
