// Linear maps of more than 8 rows on the tensor cores of compute capability 9.0 (wgmma): the arithmetic of many_rows.cu
// to the bit. out[r][o] = sum over k of x[r][k] w[o][k], plus bias[o]; x is [rows][cols], w [outputs][cols].
//
// A block takes 128 outputs and N rows. One of its warps copies packed weights and panels of x, as they lie in memory,
// into rings in shared memory. Two groups of four warps multiply: a warp loads its tile of 16 outputs into registers
// and decodes it if it is quantized, and the instruction reads x from shared memory. Each step of 16 columns adds to
// the same f32 sums in the same order as `mma` does in many_rows.cu, and gives the same bits (measured on an H200: no
// difference in 10^4 sums of up to 4,096 columns, f16 and bf16).
//
// If there are too few tiles for the multiprocessors, the slices of the columns are distributed over several blocks,
// which leave their sums in the workspace (that is, in the L2 cache): `linear_combine`, or the norm that comes next,
// adds them up. (The blocks of a cluster could do that in each other's shared memory, but only 30 clusters of eight
// blocks with half a multiprocessor each run at once on an H200, and a product with 4,096 outputs has 32 of them.)
//
// When gated, a block takes 64 outputs of the gate and the same 64 of up, and writes the operand that the next product
// reads.
//
// Bytes moved: the weights once for every N rows, x once for every 128 outputs, mostly from the L2 cache. Bound: the
// tensor cores, with enough rows; memory bandwidth, with few.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The first four warps have 64 outputs of the gate, the others the same of up. Both are written to shared memory and
// read back by rows to compute activation(gate) * up: in f32, and rounded to bf16 as the operand of the next product.
// (Rows of bf16 have no factor.)
template <int N>
DEVICE void write_gated(const Linear& p, const float (&total)[N / 2], float* shared) {
    // [gate, up][row][output]; the pitch of a row is no multiple of 32 values, so that rows lie in different banks.
    static const u32 PITCH = 68;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 first_row = blockIdx.x * N, first_output = blockIdx.y * 64;
    const float* bias = p.parts[warp / 4].bias;
    asm volatile("bar.sync 1, 256;" ::: "memory");
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 output = warp % 4 * 16 + g + i / 2 * 8;
            shared[(warp / 4 * N + n * 8 + 2 * t + i % 2) * PITCH + output] = finished(total[4 * n + i], 1.0f, bias,
                first_output + output);
        }
    asm volatile("bar.sync 1, 256;" ::: "memory");
    // Not unrolled: the code of the activations is long and would not stay in the instruction cache.
#pragma unroll 1
    for (u32 row = warp; row < min((u32)N, p.num_rows - first_row); row += 8) {
        float2 gate = *(const float2*)(shared + row * PITCH + 2 * lane),
            up = *(const float2*)(shared + (N + row) * PITCH + 2 * lane);
        float low = gated(p.activation, gate.x, up.x), high = gated(p.activation, gate.y, up.y);
        *(float2*)(p.parts[0].out + (u64)(first_row +
            row) * p.parts[0].outputs + first_output + 2 * lane) = make_float2(low, high);
        u32 rounded = float_to_bf16(low) | (u32)float_to_bf16(high) << 16;
        *(u32*)(p.result.numbers + operand_place(first_row + row, first_output + 2 * lane, p.result.pitch)) = rounded;
        if (blockIdx.y == 0 && lane == 0) p.result.scales[first_row + row] = 1.0f;
    }
}

// A warp for each row, four outputs a lane.
template <class W, int N>
DEVICE void write_tile(const Linear& p, const float (&total)[N / 2], float* shared) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = blockIdx.x * N;
    put_sums<W, N>(total, shared);
    asm volatile("bar.sync 1, 256;" ::: "memory");
#pragma unroll 4
    for (u32 row = warp; row < min((u32)N, p.num_rows - first_row); row += 8) {
        float4 sums = *(const float4*)(shared + row * SUMS_PITCH + lane * 4);
        write_four(p, first_row + row, blockIdx.y * 8 + lane / 4, lane % 4 * 4, sums, p.x.scales[first_row + row]);
    }
}

// Writes the sums of a slice to the workspace.
template <class W, int N>
DEVICE void leave_sums(const Linear& p, u32 slice, const float (&sum)[N / 2]) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, first_row = blockIdx.x * N;
    float* to = slice_sums(p, slice) + (u64)first_row * slice_width(p) + (blockIdx.y * 8 + warp) * 16 + g;
#pragma unroll
    for (u32 n = 0; n < N / 8; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 row = n * 8 + 2 * t + i % 2;
            if (first_row + row < p.num_rows) to[row * slice_width(p) + i / 2 * 8] = grown<W>(sum[4 * n + i]);
        }
}

// With few rows the bound is memory, and with slices the start and end of blocks: two blocks then share a
// multiprocessor.
template <int N, bool SPLIT>
struct WideBlocks {
    static const int COUNT = N <= 32 || (N == 64 && SPLIT) ? 2 : 1;
};

// blockIdx: x = rows, y = outputs; when SPLIT, z = some of the slices. When GATED, four of the eight tiles are of the
// gate, and four of up.
template <int F, int N, bool SPLIT, bool GATED = false>
DEVICE void wide(const Linear& p) {
    typedef Weights<F> W;
    u32 first_row = blockIdx.x * N, first_tile = blockIdx.y * (GATED ? 4 : 8);
    WideTask task;
    u32 my_slices = SPLIT ? p.slices / gridDim.z : p.slices;
    task.cols = p.cols;
    task.slices = p.slices;
    task.begin_slice = SPLIT ? blockIdx.z * my_slices : 0;
    task.end_slice = task.begin_slice + my_slices;
    u32 group = slice_start(p.cols, p.slices, task.begin_slice);
    // The eight tiles belong to one matrix: its number of tiles is padded.
    const LinearPart& part = GATED ? p.parts[0] : part_of(p, first_tile);
    task.weights = group_weights<W>(part.weight, first_tile - part.first_tile, group, p.cols);
    task.weights_up = GATED ? group_weights<W>(p.parts[1].weight, first_tile, group, p.cols) : 0;
    task.x = panel_rows(p.x, first_row, group);
    wide_product<F, N, WideBlocks<N, SPLIT>::COUNT, SPLIT, GATED>(task,
        [&](u32 slice, const float (&sums)[N / 2], float* shared) {
            if (SPLIT)
                leave_sums<W, N>(p, slice, sums);
            else if (GATED)
                write_gated<N>(p, sums, shared);
            else
                write_tile<W, N>(p, sums, shared);
        });
}

#else

// Other GPUs use `linear_many`.
template <int F, int N, bool SPLIT, bool GATED = false>
DEVICE void wide(const Linear& p) {}

#endif

#define WIDE(NAME, F)                                                                                       \
    KERNEL void __launch_bounds__(384, 2) wide16_##NAME(Linear p) { wide<F, 16, false>(p); }                 \
    KERNEL void __launch_bounds__(384, 2) wide32_##NAME(Linear p) { wide<F, 32, false>(p); }                 \
    KERNEL void __launch_bounds__(384, 1) wide64_##NAME(Linear p) { wide<F, 64, false>(p); }                 \
    KERNEL void __launch_bounds__(384, 1) wide128_##NAME(Linear p) { wide<F, 128, false>(p); }               \
    KERNEL void __launch_bounds__(384, 2) wide16_split_##NAME(Linear p) { wide<F, 16, true>(p); }            \
    KERNEL void __launch_bounds__(384, 2) wide32_split_##NAME(Linear p) { wide<F, 32, true>(p); }            \
    KERNEL void __launch_bounds__(384, 2) wide64_split_##NAME(Linear p) { wide<F, 64, true>(p); }            \
    KERNEL void __launch_bounds__(384, 1) wide128_split_##NAME(Linear p) { wide<F, 128, true>(p); }

// Gated for bf16 only, whose result can be rounded at once: f16 needs the largest magnitude of a row first.
KERNEL void __launch_bounds__(384, 2) wide16_gated_bf16(Linear p) { wide<BF16, 16, false, true>(p); }
KERNEL void __launch_bounds__(384, 2) wide32_gated_bf16(Linear p) { wide<BF16, 32, false, true>(p); }
KERNEL void __launch_bounds__(384, 1) wide64_gated_bf16(Linear p) { wide<BF16, 64, false, true>(p); }
KERNEL void __launch_bounds__(384, 1) wide128_gated_bf16(Linear p) { wide<BF16, 128, false, true>(p); }

WIDE(f16, F16)
WIDE(bf16, BF16)
WIDE(q8_0, Q8_0)
WIDE(q4_0, Q4_0)
WIDE(q4_k, Q4_K)
WIDE(q5_k, Q5_K)
WIDE(q6_k, Q6_K)
WIDE(mxfp4, MXFP4)
