"""The pages of the operator console."""
