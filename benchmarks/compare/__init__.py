"""The same durable work done by what a user would pick instead, measured in turns with ours."""
