"""
Before there are workers: checks, converts and hooks in. Imports all rooms but `memory` and
`commands`.
"""
