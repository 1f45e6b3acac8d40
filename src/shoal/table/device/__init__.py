"""Tables in device memory."""
