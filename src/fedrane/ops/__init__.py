"""Mathematics shared by methods: each function stands on its own, on plain tensors."""
