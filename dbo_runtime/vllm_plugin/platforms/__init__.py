"""One object per platform, with the differences between CPU, CUDA and NPU."""
