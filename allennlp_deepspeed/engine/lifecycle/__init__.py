"""DeepSpeed's engine from its initialization to its end, and what is attached to it meanwhile."""
