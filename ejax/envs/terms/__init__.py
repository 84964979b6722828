"""Functions of the world that tasks are made of, by name: rewards, observations, actions, events, ends, commands."""
