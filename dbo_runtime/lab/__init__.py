"""What a server never imports: rooms with a command each, for those who plan, verify, compare and look."""
