/* In place of the driver's library, where there is no GPU: what libraries of torch and vLLM look up in it. All fails. */
enum { NO_DEVICE = 100, NOT_FOUND = 500 };

int cuInit(unsigned flags) { return NO_DEVICE; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetProcAddress(const char *name, void **found, int version, unsigned long long flags) {
    *found = 0;
    return NOT_FOUND;
}
int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long long flags, void *status) {
    *found = 0;
    return NOT_FOUND;
}
int cuPointerGetAttribute(void *data, int attribute, unsigned long long pointer) { return NO_DEVICE; }
int cuTensorMapEncodeTiled(void) { return NO_DEVICE; }
