"""Which keys get a row, and which rows a table keeps."""
