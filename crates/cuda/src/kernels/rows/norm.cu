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
DEVICE void load_stretch(float (&held)[HELD], const Norm& n, float* x) {
    const float* y = n.y + (u64)blockIdx.x * n.width;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        u32 i = threadIdx.x + k * blockDim.x;
        held[k] = i < n.width ? x[i] : 0.0f;
    }
    if (!n.y && !n.slices.sums) return;
    float other[HELD];
    if (n.slices.sums) {
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
        x[i] = __fadd_rn(x[i], n.slices.sums ? added_up(n.slices, blockIdx.x, i) : y[i]);
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
KERNEL void __launch_bounds__(1024, 1) rms_norm(Norm n) {
    let_next_start();
    float held[HELD], weight[HELD];
    hold_weights(weight, n);
    wait_for_previous();
    float* x = n.x + (u64)blockIdx.x * n.width;
    load_stretch(held, n, x);
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < HELD; k++) sum = __fmaf_rn(held[k], held[k], sum);
    for (u32 i = threadIdx.x + HELD * blockDim.x; i < n.width; i += blockDim.x) sum = __fmaf_rn(x[i], x[i], sum);
    sum = block_sum(sum);
    float factor = rms_factor(sum, n.width, n.eps);
    write_stretch(held, weight, n, x, [&](float value, float w, u32) { return __fmul_rn(__fmul_rn(value, factor), w);
        });
}

// out = (x - mean) / sqrt(var + eps) * weight + bias
KERNEL void __launch_bounds__(1024, 1) layer_norm(Norm n) {
    let_next_start();
    float held[HELD], weight[HELD];
    hold_weights(weight, n);
    wait_for_previous();
    float* x = n.x + (u64)blockIdx.x * n.width;
    load_stretch(held, n, x);
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
