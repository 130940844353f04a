"""
One run, told step by step. Imports all rooms but `launch`, `memory` and `commands`.
"""
