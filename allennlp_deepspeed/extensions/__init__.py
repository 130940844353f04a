"""
Optional features that plug into the optimizer step. No other folder imports them:
`training/step_extension.py` finds each by its key.
"""
