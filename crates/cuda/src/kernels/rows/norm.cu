// RMSNorm and LayerNorm over stretches of a row: x and out are [rows][width * stretches] in f32, weight and bias
// [width].
//
// A block for each stretch; its size fixes the order of the sums. Bytes moved: x twice (read, and written if something
// is added to it), out once. Bound: latency, with few rows; memory bandwidth, with many.

struct Norm {
    float* x;
    const float* y;     // added to x first if not null; or the sum of `slices`
    SliceSums slices;
    const float* weight;
    const float* bias;  // LayerNorm only
    float* out;
    u32 width;          // values in a stretch
    float eps;
    u32 with_operand;   // only when a stretch is a whole row
    Operand operand;
    u32 num_stretches;  // of `rms_norm_heads`
};

// The sums of slices for the values that a thread holds. All loads are issued before the first addition.
DEVICE void add_up(float (&total)[HELD], const SliceSums& p, u32 width) {
    const float* from = p.sums + (u64)blockIdx.x * p.pitch + threadIdx.x;
    float sums[MAX_SLICES][HELD];
#pragma unroll
    for (u32 s = 0; s < MAX_SLICES; s++)
#pragma unroll
        for (int k = 0; k < HELD; k++)
            if (s < p.count && threadIdx.x + k * blockDim.x < width) sums[s][k] = from[s * p.stride + k * blockDim.x];
    float scale = p.scales[blockIdx.x];
#pragma unroll
    for (int k = 0; k < HELD; k++) {
#pragma unroll
        for (u32 s = 1; s < MAX_SLICES; s++)
            if (s < p.count) sums[0][k] = __fadd_rn(sums[0][k], sums[s][k]);
        u32 i = threadIdx.x + k * blockDim.x;
        if (i < width) total[k] = finished(sums[0][k], scale, p.bias, i);
    }
}

// Loads a stretch: x or, if there is a y, x + y, which is also written to x.
template <bool SLICES>
DEVICE void load_stretch(float (&held)[HELD], const Norm& n, float* x) {
    const float* y = n.y + (u64)blockIdx.x * n.width;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        u32 i = threadIdx.x + k * blockDim.x;
        held[k] = i < n.width ? x[i] : 0.0f;
    }
    bool in_slices = SLICES && n.slices.sums;
    if (!n.y && !in_slices) return;
    float other[HELD];
    if (in_slices) {
        add_up(other, n.slices, n.width);
    } else {
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            u32 i = threadIdx.x + k * blockDim.x;
            if (i < n.width) other[k] = y[i];
        }
    }
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        u32 i = threadIdx.x + k * blockDim.x;
        if (i < n.width) x[i] = held[k] = __fadd_rn(held[k], other[k]);
    }
    for (u32 i = threadIdx.x + HELD * blockDim.x; i < n.width; i += blockDim.x)
        x[i] = __fadd_rn(x[i], in_slices ? added_up(n.slices, blockIdx.x, i) : y[i]);
}

// Loads the weights of the values that a thread holds. They do not depend on the kernels before, so this comes before
// the wait.
DEVICE void hold_weights(float (&weight)[HELD], const Norm& n) {
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        u32 i = threadIdx.x + k * blockDim.x;
        weight[k] = i < n.width ? n.weight[i] : 0.0f;
    }
}

// Writes `normed(x, weight, i)` of every value, and the operand.
template <class Normed>
DEVICE void write_stretch(float (&held)[HELD], const float (&weight)[HELD], const Norm& n, const float* x,
    Normed normed) {
    float* out = n.out + (u64)blockIdx.x * n.width;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        u32 i = threadIdx.x + k * blockDim.x;
        if (i < n.width) out[i] = held[k] = normed(held[k], weight[k], i);
    }
    for (u32 i = threadIdx.x + HELD * blockDim.x; i < n.width; i += blockDim.x) out[i] = normed(x[i], n.weight[i], i);
    // A thread reads back only what it wrote itself.
    if (n.with_operand) write_operand(n.operand, blockIdx.x, n.width, held, [&](u32 i) { return out[i]; });
}

// out = x / sqrt(mean(x^2) + eps) * weight
template <bool SLICES>
DEVICE void rms_norm_row(const Norm& n) {
    let_next_start();
    float held[HELD], weight[HELD];
    hold_weights(weight, n);
    wait_for_previous();
    float* x = n.x + (u64)blockIdx.x * n.width;
    load_stretch<SLICES>(held, n, x);
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < HELD; k++) sum = __fmaf_rn(held[k], held[k], sum);
    for (u32 i = threadIdx.x + HELD * blockDim.x; i < n.width; i += blockDim.x) sum = __fmaf_rn(x[i], x[i], sum);
    sum = block_sum(sum);
    float factor = rms_factor(sum, n.width, n.eps);
    write_stretch(held, weight, n, x, [&](float value, float w, u32) { return __fmul_rn(__fmul_rn(value, factor), w);
        });
}

KERNEL void __launch_bounds__(1024, 1) rms_norm(Norm n) { rms_norm_row<true>(n); }

// Without slices it needs half the registers: two blocks share a multiprocessor, which many rows need.
KERNEL void __launch_bounds__(1024, 2) rms_norm_many(Norm n) { rms_norm_row<false>(n); }

// `rms_norm` for stretches of at most 32 * HELD values, to the bit: a warp takes a stretch, and a block eight.
KERNEL void __launch_bounds__(256) rms_norm_heads(Norm n) {
    let_next_start();
    u32 stretch = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    float held[HELD], weight[HELD], sum = 0.0f;
#pragma unroll
    for (int k = 0; k < HELD; k++) weight[k] = lane + k * 32 < n.width ? n.weight[lane + k * 32] : 0.0f;
    wait_for_previous();
    if (stretch >= n.num_stretches) return;
    const float* x = n.x + (u64)stretch * n.width;
    float* out = n.out + (u64)stretch * n.width;
#pragma unroll
    for (int k = 0; k < HELD; k++) held[k] = lane + k * 32 < n.width ? x[lane + k * 32] : 0.0f;
#pragma unroll
    for (int k = 0; k < HELD; k++) sum = __fmaf_rn(held[k], held[k], sum);
    float factor = rms_factor(warp_sum(sum), n.width, n.eps);
#pragma unroll
    for (int k = 0; k < HELD; k++)
        if (lane + k * 32 < n.width)
            out[lane + k * 32] = __fmul_rn(__fmul_rn(held[k], factor), weight[k]);
}

// out = (x - mean) / sqrt(var + eps) * weight + bias
KERNEL void __launch_bounds__(1024, 1) layer_norm(Norm n) {
    let_next_start();
    float held[HELD], weight[HELD];
    hold_weights(weight, n);
    wait_for_previous();
    float* x = n.x + (u64)blockIdx.x * n.width;
    load_stretch<true>(held, n, x);
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < HELD; k++) sum = __fadd_rn(sum, held[k]);
    for (u32 i = threadIdx.x + HELD * blockDim.x; i < n.width; i += blockDim.x) sum = __fadd_rn(sum, x[i]);
    float mean = __fdiv_rn(block_sum(sum), (float)n.width);
    float squares = 0.0f;
    auto square = [&](float value) {
        float difference = __fsub_rn(value, mean);
        squares = __fmaf_rn(difference, difference, squares);
    };
#pragma unroll
    for (int k = 0; k < HELD; k++)
        if (threadIdx.x + k * blockDim.x < n.width) square(held[k]);
    for (u32 i = threadIdx.x + HELD * blockDim.x; i < n.width; i += blockDim.x) square(x[i]);
    float variance = __fdiv_rn(block_sum(squares), (float)n.width);
    float factor = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(variance, n.eps)));
    write_stretch(held, weight, n, x, [&](float value, float w, u32 i) {
        return __fadd_rn(__fmul_rn(__fmul_rn(__fsub_rn(value, mean), factor), w), n.bias[i]);
    });
}
