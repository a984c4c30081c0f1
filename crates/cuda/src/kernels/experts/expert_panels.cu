// Linear maps of rows with their selected experts on the tensor cores of compute capability 9.0, without the host. The
// pairs (row, expert) are grouped by expert, and an operand is made with a row for each pair, so that the rows of an
// item lie in one panel. A block takes an item and 128 outputs (of gate and up, 64 each), as in many_rows_wgmma.cu,
// and to the bit with the same sums.
//
// Bytes moved: the weights of an expert once for every item, x once for every 128 outputs, mostly from the L2 cache.
// Bound: memory bandwidth if experts have few rows, the tensor cores if they have many.

struct ExpertInput {
    Operand x;         // a row for each row
    const u32* order;  // pair of each place
    u32* maxima;       // of each place, cleared here
    u32 pairs_a_row;   // consecutive pairs that share a row of x
    Operand operand;   // a row for each place
};

// Copies the rows of an operand into the order of their experts; a block for each place, a thread for eight values.
KERNEL void __launch_bounds__(1024, 1) expert_input(ExpertInput e) {
    begin();
    u32 place = blockIdx.x, pair = e.order[place];
    if (pair == NO_PAIR) return;
    u32 row = pair / e.pairs_a_row;
    if (threadIdx.x == 0) {
        e.maxima[place] = 0;
        e.operand.scales[place] = e.x.scales[row];
    }
    for (u32 i = threadIdx.x * 8; i < e.x.pitch; i += blockDim.x * 8)
        *(uint4*)(e.operand.numbers + operand_place(place, i, e.x.pitch)) =
            *(const uint4*)(e.x.numbers + operand_place(row, i, e.x.pitch));
}

struct GatedOperand {
    const float* x;       // [places][cols], whole groups of eight columns
    const u32* order;
    const float* maxima;  // largest magnitude of each row
    u32 cols;
    Operand operand;
};

// The operand of rows whose largest magnitudes are known, as `write_operand` makes it; a block for each place, a thread
// for eight values.
KERNEL void __launch_bounds__(1024, 1) gated_operand(GatedOperand g) {
    begin();
    u32 place = blockIdx.x;
    if (g.order[place] == NO_PAIR) return;
    u32 forward = forward_exponent(g.maxima[place]);
    float factor = power(forward);
    auto rounded = [&](float value) -> u32 {
        return g.operand.is_bf16 ? float_to_bf16(value) : float_to_half(__fmul_rn(value, factor));
    };
    auto pair_of = [&](float low, float high) { return rounded(low) | rounded(high) << 16; };
    for (u32 i = threadIdx.x * 8; i < g.operand.pitch; i += blockDim.x * 8) {
        uint4 numbers = make_uint4(0, 0, 0, 0);
        if (i < g.cols) {
            const float4* x = (const float4*)(g.x + (u64)place * g.cols + i);
            float4 a = x[0], b = x[1];
            numbers = make_uint4(pair_of(a.x, a.y), pair_of(a.z, a.w), pair_of(b.x, b.y), pair_of(b.z, b.w));
        }
        *(uint4*)(g.operand.numbers + operand_place(place, i, g.operand.pitch)) = numbers;
    }
    if (threadIdx.x == 0) g.operand.scales[place] = g.operand.is_bf16 ? 1.0f : power(254 - forward);
}

struct ExpertPanels {
    const ExpertWeights* experts;
    const ExpertItem* items;
    const u32* num_items;
    const u32* order;
    Operand x;    // a row for each place
    float* out;   // when gated [places][outputs], else [pairs][outputs]
    u32* maxima;  // when gated, the largest magnitude of each row of the result, as bits
    u32 cols, outputs, slices;
    u32 activation;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// activation(gate) * up in f32: 64 outputs of every row of an item, two a lane.
template <class W, int N>
DEVICE void write_gated_rows(const ExpertPanels& p, const ExpertItem& item, const float (&sums)[N / 2],
                             float* shared) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, output = blockIdx.x * 64 + 2 * lane;
    const float *gate_bias = p.experts[item.expert].bias[0], *up_bias = p.experts[item.expert].bias[1];
    put_sums<W, N>(sums, shared);
    asm volatile("bar.sync 1, 256;" ::: "memory");
    // Not unrolled: the code of the activations is long and would not stay in the instruction cache.
#pragma unroll 1
    for (u32 row = warp; row < item.count; row += 8) {
        u32 place = item.first + row;
        float scale = p.x.scales[place];
        const float* from = shared + row * SUMS_PITCH + 2 * lane;
        float2 gate = *(const float2*)from, up = *(const float2*)(from + 64);
        float low = gated(p.activation, finished(gate.x, scale, gate_bias, output),
            finished(up.x, scale, up_bias, output));
        float high = gated(p.activation, finished(gate.y, scale, gate_bias, output + 1),
            finished(up.y, scale, up_bias, output + 1));
        *(float2*)(p.out + (u64)place * p.outputs + output) = make_float2(low, high);
        float largest = warp_max(fmaxf(magnitude(low), magnitude(high)));
        if (lane == 0) atomicMax(p.maxima + place, __float_as_uint(largest));
    }
}

// 128 outputs of every row of an item, four a lane, to the place of its pair.
template <class W, int N>
DEVICE void write_pair_rows(const ExpertPanels& p, const ExpertItem& item, const float (&sums)[N / 2], float* shared) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, output = blockIdx.x * 128 + 4 * lane;
    const float* bias = p.experts[item.expert].bias[2];
    put_sums<W, N>(sums, shared);
    asm volatile("bar.sync 1, 256;" ::: "memory");
    for (u32 row = warp; row < item.count; row += 8) {
        float scale = p.x.scales[item.first + row];
        float4 sum = *(const float4*)(shared + row * SUMS_PITCH + 4 * lane);
        const float values[4] = {sum.x, sum.y, sum.z, sum.w};
        float* out = p.out + (u64)p.order[item.first + row] * p.outputs + output;
        if (output + 4 <= p.outputs && p.outputs % 4 == 0) {
            *(float4*)out = make_float4(finished(sum.x, scale, bias, output), finished(sum.y, scale, bias, output + 1),
                                        finished(sum.z, scale, bias, output + 2),
                                        finished(sum.w, scale, bias, output + 3));
            continue;
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            if (output + i < p.outputs) out[i] = finished(values[i], scale, bias, output + i);
    }
}

template <int F, bool GATED, int N, int BLOCKS>
DEVICE void expert_panel(const ExpertPanels& p, const ExpertItem& item) {
    typedef Weights<F> W;
    const ExpertWeights& expert = p.experts[item.expert];
    u32 first_tile = blockIdx.x * (GATED ? 4 : 8);
    WideTask task;
    task.weights = group_weights<W>(expert.weight[GATED ? 0 : 2], first_tile, 0, p.cols);
    task.weights_up = GATED ? group_weights<W>(expert.weight[1], first_tile, 0, p.cols) : 0;
    task.x = panel_rows(p.x, item.first, 0);
    task.cols = p.cols;
    task.slices = p.slices;
    task.begin_slice = 0;
    task.end_slice = p.slices;
    wide_product<F, N, BLOCKS, false, GATED>(task, [&](u32, const float (&sums)[N / 2], float* shared) {
        if (GATED)
            write_gated_rows<W, N>(p, item, sums, shared);
        else
            write_pair_rows<W, N>(p, item, sums, shared);
    });
}

// blockIdx: x = outputs, y = item, so that blocks that read the same rows run at once, and the items of an expert,
// which read the same weights, one after the other. Items have up to MOST rows, and the last ones of experts fewer.
template <int F, bool GATED, int MOST>
DEVICE void expert_panels(const ExpertPanels& p) {
    begin();
    // The table has an entry for each block; unused entries are not read.
    ExpertItem item = p.items[blockIdx.y];
    if (blockIdx.y >= *p.num_items) return;
    if (MOST == 16)
        expert_panel<F, GATED, 16, 2>(p, item);
    else if (MOST == 32)
        expert_panel<F, GATED, 32, 2>(p, item);
    else if (item.count <= 32)
        expert_panel<F, GATED, 32, 1>(p, item);
    else if (item.count <= 64)
        expert_panel<F, GATED, 64, 1>(p, item);
    else
        expert_panel<F, GATED, 128, 1>(p, item);
}

#else

// Other GPUs use expert_rows.cu, or linear maps of each expert.
template <int F, bool GATED, int MOST>
DEVICE void expert_panels(const ExpertPanels& p) {}

#endif

#define PANELS(NAME, F)                                                                                              \
    KERNEL void __launch_bounds__(384, 2) panels16_gated_##NAME(ExpertPanels p) { expert_panels<F, true, 16>(p); }   \
    KERNEL void __launch_bounds__(384, 2) panels16_down_##NAME(ExpertPanels p) { expert_panels<F, false, 16>(p); }   \
    KERNEL void __launch_bounds__(384, 2) panels32_gated_##NAME(ExpertPanels p) { expert_panels<F, true, 32>(p); }   \
    KERNEL void __launch_bounds__(384, 2) panels32_down_##NAME(ExpertPanels p) { expert_panels<F, false, 32>(p); }   \
    KERNEL void __launch_bounds__(384, 1) panels128_gated_##NAME(ExpertPanels p) { expert_panels<F, true, 128>(p); } \
    KERNEL void __launch_bounds__(384, 1) panels128_down_##NAME(ExpertPanels p) { expert_panels<F, false, 128>(p); }

PANELS(f16, F16)
PANELS(bf16, BF16)
PANELS(q8_0, Q8_0)
PANELS(q4_0, Q4_0)
PANELS(q4_k, Q4_K)
PANELS(q5_k, Q5_K)
PANELS(q6_k, Q6_K)
PANELS(mxfp4, MXFP4)
