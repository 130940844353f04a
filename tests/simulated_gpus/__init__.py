"""
Trainings on a machine with GPUs, without one: PyTorch, its NCCL process groups, DeepSpeed and the
`allennlp` command are the real ones, on a simulated CUDA (`runtime.cpp`) that computes nothing and
logs everything. It tells nothing of numbers, but all of processes, threads, devices, contexts,
communicators, waits and launches.
"""
