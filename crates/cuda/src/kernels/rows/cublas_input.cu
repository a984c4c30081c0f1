// Input of an f16 product by cuBLASLt: rows of f32 rounded to f16, times one factor that keeps the largest value in
// range, and the inverse factor for the product.
//
// Our own products have a factor for each row (see `Operand`); the library takes one for a whole product. Values down
// to 2^-28 of the largest keep all their bits. Values that are not finite do not affect the factor, and stay what they
// are. Bytes moved: x twice. Bound: memory.

struct FastScalars {
    u32 largest;  // largest magnitude of all finite values, as bits; cleared before
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
    // Magnitudes are not negative, so their bits compare as the values do.
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
