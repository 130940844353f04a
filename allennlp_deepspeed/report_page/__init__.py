"""
The HTML page of `allennlp deepspeed report`, from what trainings have left in their directories.
"""
