"""What is put into an unmodified vLLM, and when."""
