"""EmbodiChain's spellings, releases and gym configs, and what becomes of each of their keys."""
