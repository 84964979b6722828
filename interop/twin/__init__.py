"""The parts of a policy's torch twin: ``interop.policy`` puts them together."""
