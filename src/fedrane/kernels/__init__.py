"""Fast operations for a stack of clients, and work-arounds for faults of libraries.

``dispatch`` decides which implementation runs. ``stacked_mode`` reroutes a network's calls while clients are stacked;
``convolution``, ``batch_norm``, ``pooling`` and ``sgd_step`` are what it and others call, each with PyTorch's own
operations as the fallback and oracle. ``gpu`` holds the Triton kernels; nothing else imports Triton.
``precision`` and ``onednn`` are about bf16. Nothing here knows a task, a model or an engine.
"""
