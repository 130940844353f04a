"""
Configs that have been changed at random, of recipes and of DeepSpeed configurations as they are
pasted: each trains, or is refused in a few lines before data are read.
"""
