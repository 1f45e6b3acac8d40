"""Tables in formats of others: one foreign system a file, imported by who asks for it."""
