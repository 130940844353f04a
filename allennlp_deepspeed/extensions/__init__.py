"""
Optional features that plug into the optimizer step. Nothing else imports them:
`training/step_extension.py` finds each by its key.
"""
