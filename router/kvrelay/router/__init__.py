"""What clients talk to: text and validation, placement, and both legs of every request."""
