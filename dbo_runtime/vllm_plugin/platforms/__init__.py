"""One object a platform: what is different on CPU, CUDA, and NPU."""
