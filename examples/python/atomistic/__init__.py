"""Parts of the MACE example: a quartz crystal, a small MACE, and both on several ranks."""
