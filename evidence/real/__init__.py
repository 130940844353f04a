"""
Real models, each trained by this package's command and by those of the tools that people use for
them. Imports nothing, so that a tool's command doesn't wait for what another one needs.
"""
