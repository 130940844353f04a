"""
Builds the HTML page of `allennlp deepspeed report` from the files of trainings.
"""
