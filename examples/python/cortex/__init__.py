"""Parts of the cortex example: the surface, a mesh network, training on ranks, the picture."""
