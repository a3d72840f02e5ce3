"""One module per management command, named like the command."""
