"""What ops cost: tables, their files, and how they are fitted from measurements."""
