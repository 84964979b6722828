"""EmbodiChain's manager-based environments: a scene, functors and a task from a gym config."""
