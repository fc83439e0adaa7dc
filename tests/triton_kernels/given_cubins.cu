// Kernels that take the parameters of double_kernel, and one that does not.

extern "C" __global__ void twice(float *x, int n) {
    __shared__ float kept[64];
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < n) {
        kept[threadIdx.x & 63] = x[at];
        x[at] = kept[threadIdx.x & 63] * 2;
    }
}

extern "C" __global__ void __launch_bounds__(32) narrow(float *x, int n) {
    if (threadIdx.x < n) x[threadIdx.x] *= 2;
}

extern "C" __global__ void wide(float *x, long n, float by) {
    if (threadIdx.x < n) x[threadIdx.x] *= by;
}
