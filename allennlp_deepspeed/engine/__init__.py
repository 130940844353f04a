"""
DeepSpeed's engine around a model: the only folder that touches DeepSpeed's private attributes.
"""
