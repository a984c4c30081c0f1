// What a library's product of f16 needs around it: rows of f32 rounded to f16, with one factor for all of them that keeps the largest number
// in range, and the factor that takes the product back.
//
// Our own products give each row a factor (see `Operand`); the library takes one for a product. Numbers down to 2^-28 of the largest keep all
// their bits, so that only the range of a whole step is shared. What is not finite has no say in the factor, and stays what it is.

struct FastScalars {
    u32 largest;  // magnitude of all finite numbers, as bits; cleared before
    float back;
    float zero;
};

struct FastRows {
    const float* x;
    u16* out;
    FastScalars* scalars;
    u64 len;
};

KERNEL void __launch_bounds__(256) find_largest(FastRows r) {
    begin();
    float largest = 0.0f;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < r.len; i += (u64)gridDim.x * blockDim.x) {
        float size = magnitude(r.x[i]);
        if (size < __int_as_float(0x7f800000)) largest = fmaxf(largest, size);
    }
    largest = block_max(largest);
    // Not negative, so that the bits compare as the numbers do.
    if (threadIdx.x == 0) atomicMax(&r.scalars->largest, __float_as_uint(largest));
}

KERNEL void __launch_bounds__(256) round_to_half(FastRows r) {
    begin();
    u32 forward = forward_exponent(__uint_as_float(r.scalars->largest));
    float factor = power(forward);
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < r.len; i += (u64)gridDim.x * blockDim.x)
        r.out[i] = float_to_half(__fmul_rn(r.x[i], factor));
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        r.scalars->back = power(254 - forward);
        r.scalars->zero = 0.0f;
    }
}
