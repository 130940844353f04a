"""Public AllenNLP projects, at a commit, beside AllenNLP's own trainer."""
