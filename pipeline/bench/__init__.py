"""Measure what runs cost on an installation, and check the promise after each measurement."""
