// RMSNorm inside a product of few rows, to the bit as `rms_norm` computes it (norm.cu): the order of its sum stands
// here and there.
//
// `rms_norm` has 1024 threads for a row. Here 256 threads take the part of four each: the four have adjacent values, so
// that the last two steps of the sum over the 32 threads of a warp fall within one thread.

// out = x * rms_factor * weight
DEVICE float rms_factor(float sum_of_squares, u32 cols, float eps) {
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum_of_squares, (float)cols), eps)));
}

DEVICE void add_squares(float (&sum)[4], const float4& v) {
    sum[0] = __fmaf_rn(v.x, v.x, sum[0]);
    sum[1] = __fmaf_rn(v.y, v.y, sum[1]);
    sum[2] = __fmaf_rn(v.z, v.z, sum[2]);
    sum[3] = __fmaf_rn(v.w, v.w, sum[3]);
}

// The sum over eight threads, which take the part of one warp of `rms_norm`.
DEVICE float norm_part(float (&sum)[4]) {
#pragma unroll
    for (int distance = 4; distance > 0; distance /= 2)
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(FULL_WARP, sum[i], distance));
    return __fadd_rn(__fadd_rn(sum[0], sum[2]), __fadd_rn(sum[1], sum[3]));
}

// The factor of a row from its 32 parts in shared memory.
DEVICE float norm_factor(const float* parts, u32 cols, float eps) {
    return rms_factor(warp_sum(parts[threadIdx.x % 32]), cols, eps);
}

DEVICE float4 normed(const float4& v, float factor, const float4& w) {
    return make_float4(__fmul_rn(__fmul_rn(v.x, factor), w.x), __fmul_rn(__fmul_rn(v.y, factor), w.y),
                       __fmul_rn(__fmul_rn(v.z, factor), w.z), __fmul_rn(__fmul_rn(v.w, factor), w.w));
}

DEVICE float largest_of(float largest, const float4& v) {
    return fmaxf(largest, fmaxf(fmaxf(magnitude(v.x), magnitude(v.y)), fmaxf(magnitude(v.z), magnitude(v.w))));
}

// Four values of an f16 operand.
DEVICE uint2 half_vector(const float4& v, float by) {
    return make_uint2(float_to_half(__fmul_rn(v.x, by)) | (u32)float_to_half(__fmul_rn(v.y, by)) << 16,
                      float_to_half(__fmul_rn(v.z, by)) | (u32)float_to_half(__fmul_rn(v.w, by)) << 16);
}
