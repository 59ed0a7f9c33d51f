"""Mathematics shared by methods: independent functions of plain tensors."""
