"""What is below the memory of tables, on a host or a device."""
