"""What a user would pick instead, one module each."""
