"""A shop in Flask."""
