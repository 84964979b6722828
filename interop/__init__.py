"""Where torch lives: ejax's data, policies and checkpoints in EmbodiChain's form, and back."""
