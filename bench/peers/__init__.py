"""The peer benchmark: the same model, the same run, every loader at its best settings."""
