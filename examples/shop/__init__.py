"""Tell customers about their orders: each message is sent once."""
