"""The torch side: ejax's data, policies and checkpoints in EmbodiChain's form, and back."""
