"""Where vLLM is met, and nowhere else. vLLM finds `register.register` through its plugin entry point."""
