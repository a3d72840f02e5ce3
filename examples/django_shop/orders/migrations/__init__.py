"""Migrations of the shop's own tables."""
