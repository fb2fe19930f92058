"""Install this package into an unmodified vLLM: hooks of its workers, and the set-up of a loaded model."""
