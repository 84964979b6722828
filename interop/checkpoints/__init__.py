"""EmbodiChain's checkpoints: their files, their content, and the state of a run in their form."""
