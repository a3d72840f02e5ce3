"""A shop in FastAPI."""
