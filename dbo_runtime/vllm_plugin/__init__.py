"""Everything that imports vLLM. vLLM finds `register.register` through its plugin entry point."""
