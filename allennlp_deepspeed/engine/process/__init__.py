"""The worker's process: environment, device, collectives, signals and failure."""
