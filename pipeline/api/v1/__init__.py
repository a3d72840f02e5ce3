"""The JSON endpoints under /v1."""
