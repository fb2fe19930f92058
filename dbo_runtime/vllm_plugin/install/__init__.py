"""Install this package into an unmodified vLLM: hooks in its workers, and the setup of a loaded model."""
