"""The costs of ops: tables, their files, and fitting them to measurements."""
