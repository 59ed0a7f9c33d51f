"""Triton kernels over a stack of clients (S, …); imported by ``fedrane.kernels.dispatch`` alone."""
