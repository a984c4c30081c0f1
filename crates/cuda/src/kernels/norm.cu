// RMSNorm and LayerNorm over stretches of a row: a block for each stretch, whose size fixes the order of the sums.

struct Norm {
    const float* x;
    const float* weight;
    const float* bias;  // LayerNorm alone
    float* out;
    u32 width;          // numbers in a stretch
    float eps;
    u32 with_operand;   // only when a stretch is a whole row
    Operand operand;
};

// out = x / sqrt(mean(x^2) + eps) * weight
KERNEL void rms_norm(Norm n) {
    begin();
    const float* x = n.x + (u64)blockIdx.x * n.width;
    float* out = n.out + (u64)blockIdx.x * n.width;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < n.width; i += blockDim.x) sum = __fmaf_rn(x[i], x[i], sum);
    sum = block_sum(sum);
    float factor = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)n.width), n.eps)));
    for (u32 i = threadIdx.x; i < n.width; i += blockDim.x)
        out[i] = __fmul_rn(__fmul_rn(x[i], factor), n.weight[i]);
    // A thread reads back only what it wrote itself.
    if (n.with_operand) write_operand(n.operand, blockIdx.x, n.width, [&](u32 i) { return out[i]; });
}

// out = (x - mean) / sqrt(var + eps) * weight + bias
KERNEL void layer_norm(Norm n) {
    begin();
    const float* x = n.x + (u64)blockIdx.x * n.width;
    float* out = n.out + (u64)blockIdx.x * n.width;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < n.width; i += blockDim.x) sum = __fadd_rn(sum, x[i]);
    float mean = __fdiv_rn(block_sum(sum), (float)n.width);
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < n.width; i += blockDim.x) {
        float difference = __fsub_rn(x[i], mean);
        squares = __fmaf_rn(difference, difference, squares);
    }
    float variance = __fdiv_rn(block_sum(squares), (float)n.width);
    float factor = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(variance, n.eps)));
    for (u32 i = threadIdx.x; i < n.width; i += blockDim.x)
        out[i] = __fadd_rn(__fmul_rn(__fmul_rn(__fsub_rn(x[i], mean), factor), n.weight[i]), n.bias[i]);
    if (n.with_operand) write_operand(n.operand, blockIdx.x, n.width, [&](u32 i) { return out[i]; });
}
