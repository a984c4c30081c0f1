// Linear maps of rows with their selected experts, without the host: tables on the device tell a block which weights to
// read. out[pair][o] = sum over k of x[row][k] w[expert][o][k], plus bias; gate and up become activation(gate) * up in
// one kernel.
//
// A pair is a row and one of its experts. Pairs of the same expert are grouped, and up to eight of them, the rows of
// one mma, are an item; or up to 32, if experts have many rows. A block takes an item and a few tiles of 16 outputs.
// With so few rows that hardly two of them share an expert, pairs are not grouped: a block takes one pair, and makes
// the operand of its row too. The sums are those of many_rows.cu to the bit: the same slices of the columns, the same
// steps of 16, slices added in ascending order.
//
// Bytes moved: the weights of an expert once for every item, from the L2 cache but for the first. Bound: memory
// bandwidth, with few rows.

struct ExpertGroups {
    const u32* experts;  // expert of each pair
    u32* order;          // pairs, grouped by expert
    ExpertItem* items;
    u32* num_items;
    u32 num_pairs;
    u32 item_rows;   // maximum rows of an item
    u32 num_places;  // 0: `order` has a place for each pair; else every item begins at a multiple of `item_rows`
};

static const u32 GROUP_THREADS = 1024;

// The sum over all threads before this one, in a block of GROUP_THREADS.
DEVICE u32 sum_before(u32 x) {
    __shared__ u32 totals[32];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, sum = x;
    for (u32 distance = 1; distance < 32; distance *= 2) {
        u32 other = __shfl_up_sync(FULL_WARP, sum, distance);
        if (lane >= distance) sum += other;
    }
    __syncthreads();
    if (lane == 31) totals[warp] = sum;
    __syncthreads();
    u32 earlier = lane < warp ? totals[lane] : 0;
    for (int i = 16; i > 0; i /= 2) earlier += __shfl_xor_sync(FULL_WARP, earlier, i);
    return earlier + sum - x;
}

// One block, a thread for each expert. The order of the pairs of an expert is not deterministic; no result depends on
// it.
KERNEL void __launch_bounds__(GROUP_THREADS, 1) group_experts(ExpertGroups g) {
    __shared__ u32 counts[GROUP_THREADS], next[GROUP_THREADS];
    begin();
    u32 expert = threadIdx.x;
    counts[expert] = 0;
    for (u32 place = threadIdx.x; place < g.num_places; place += GROUP_THREADS) g.order[place] = NO_PAIR;
    __syncthreads();
    for (u32 pair = threadIdx.x; pair < g.num_pairs; pair += GROUP_THREADS) atomicAdd(&counts[g.experts[pair]], 1);
    __syncthreads();
    u32 count = counts[expert], num_items = (count + g.item_rows - 1) / g.item_rows;
    u32 first_item = sum_before(num_items), first = g.num_places ? first_item * g.item_rows : sum_before(count);
    next[expert] = first;
    for (u32 i = 0; i < num_items; i++) {
        ExpertItem item;
        item.expert = expert;
        item.first = first + i * g.item_rows;
        item.count = min(g.item_rows, count - i * g.item_rows);
        g.items[first_item + i] = item;
    }
    if (threadIdx.x == GROUP_THREADS - 1) *g.num_items = first_item + num_items;
    __syncthreads();
    for (u32 pair = threadIdx.x; pair < g.num_pairs; pair += GROUP_THREADS) g.order[atomicAdd(&next[g.experts[pair]],
        1)] = pair;
}

struct ExpertProduct {
    const ExpertWeights* experts;
    const u32* chosen;     // expert of each pair, for `expert_pair`; the other kernels have items
    const ExpertItem* items;
    const u32* num_items;
    const u32* order;
    Operand x;
    const float* x_plain;  // for weights of f32, and for `expert_pair`
    float* out;            // [pairs][outputs]
    u32 cols, outputs, slices;
    u32 pairs_a_row;       // consecutive pairs that share a row of x
    u32 first_part;        // index among gate, up, down
    u32 activation;
    // Of `expert_pair` alone. Gate and up: how to select the experts of each row, which are written for the kernels
    // that follow; 0 experts selected if that was done before. Down: how to add up the results of each row.
    Route route;
    u32* arrived;          // for each row and blockIdx.y, the blocks that are done, 0 between launches; null: no sum
    float* sum;            // [rows][outputs]
    float* residual;       // the sum is added to this too, unless null
};

static const u32 EXPERT_WARPS = 16;

// The result of one output and pair: of two parts, gate and up, activation(gate) * up.
template <u32 PARTS>
DEVICE void write_expert(const ExpertProduct& p, u32 pair, u32 output, const float (&value)[PARTS]) {
    p.out[(u64)pair * p.outputs + output] = PARTS == 2 ? gated(p.activation, value[0], value[PARTS - 1]) : value[0];
}

// A warp takes a slice of a part of a tile, and 8 * NT rows. blockIdx: x = item, y = tiles, so that the items of one
// expert, which read the same weights, run one after the other.
template <int F, u32 PARTS, int NT>
DEVICE void expert_tiles(const ExpertProduct& p) {
    typedef Weights<F> W;
    // Sums of each warp: [row of the item][output of the tile].
    __shared__ float partial[EXPERT_WARPS][NT * 128];
    begin();
    // The table has an entry for each block; unused entries are not read.
    ExpertItem item = p.items[blockIdx.x];
    if (blockIdx.x >= *p.num_items) return;
    const ExpertWeights& expert = p.experts[item.expert];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 slice = warp % p.slices, part = warp / p.slices % PARTS, tiles_at_once = EXPERT_WARPS / (p.slices * PARTS);
    u32 tile = blockIdx.y * tiles_at_once + warp / (p.slices * PARTS);
    float sum[NT][4];
#pragma unroll
    for (int n = 0; n < NT; n++) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.0f;
    if (tile * 16 < p.outputs) {
        u32 group = slice_start(p.cols, p.slices, slice), end = slice_start(p.cols, p.slices, slice + 1);
        // Of x, the second operand of an mma, a lane holds columns of row g: the address of the row, and the
        // permutation of its pieces.
        u32 place[NT], permuted[NT];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            u32 row = n * 8 + g < item.count ? p.order[item.first + n * 8 + g] / p.pairs_a_row : 0;
            permuted[n] = row % 8 * 8;
            place[n] = (u32)operand_place(row, 0, p.x.pitch) - permuted[n] + 2 * t;
        }
        const u16* x = p.x.numbers + (u64)group * 4 * PANEL_ROWS * 64;
        const u8* weights = group_weights<W>(expert.weight[p.first_part + part], tile, group, p.cols);
        typename W::Raw raw[4];
#pragma unroll
        for (int i = 0; i < 4; i++) W::template load<FromDevice>(raw[i], chunk_of<W>(weights, i), i, lane);
        for (; group < end; group++) {
            weights += group_stride<W>();
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 a[4][4];
#pragma unroll
                for (int s = 0; s < 4; s++) W::decode(a[s], raw[i], s);
                if (group + 1 < end) W::template load<FromDevice>(raw[i], chunk_of<W>(weights, i), i, lane);
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    // Hides from the compiler that the offsets are the same each time: it would keep them in registers
                    // that weights need.
                    u32 by = permuted[n];
                    asm volatile("" : "+r"(by));
                    const u16* from = x + place[n];
                    u32 b[8];
#pragma unroll
                    for (u32 k = 0; k < 8; k++) b[k] = n * 8 + g < item.count ? *(const u32*)(from + (k * 8 ^ by)) : 0;
#pragma unroll
                    for (int s = 0; s < 4; s++) multiply<F>(sum[n], a[s], b[2 * s], b[2 * s + 1]);
                }
                x += PANEL_ROWS * 64;
            }
        }
    }
    float* mine = partial[warp];
#pragma unroll
    for (int n = 0; n < NT; n++) {
        mine[(n * 8 + 2 * t) * 16 + g] = grown<W>(sum[n][0]);
        mine[(n * 8 + 2 * t + 1) * 16 + g] = grown<W>(sum[n][1]);
        mine[(n * 8 + 2 * t) * 16 + g + 8] = grown<W>(sum[n][2]);
        mine[(n * 8 + 2 * t + 1) * 16 + g + 8] = grown<W>(sum[n][3]);
    }
    __syncthreads();
    for (u32 j = threadIdx.x; j < item.count * tiles_at_once * 16; j += blockDim.x) {
        u32 i = j / (tiles_at_once * 16), o = j % (tiles_at_once * 16);
        u32 output = blockIdx.y * tiles_at_once * 16 + o;
        if (output >= p.outputs) continue;
        u32 pair = p.order[item.first + i];
        float scale = p.x.scales[pair / p.pairs_a_row];
        float value[PARTS];
#pragma unroll
        for (u32 k = 0; k < PARTS; k++) {
            float (*of_tile)[NT * 128] = &partial[(o / 16 * PARTS + k) * p.slices];
            float total = of_tile[0][i * 16 + o % 16];
            for (u32 n = 1; n < p.slices; n++) total = __fadd_rn(total, of_tile[n][i * 16 + o % 16]);
            value[k] = finished(total, scale, expert.bias[p.first_part + k], output);
        }
        write_expert<PARTS>(p, pair, output, value);
    }
}

// Makes the operand of a row in shared memory, its columns in order, padded to whole groups; `held` as for
// `write_operand`. Returns the factor.
template <bool IS_BF16>
DEVICE float pair_operand(const float* x, u32 cols, const float (&held)[HELD], u16* to) {
    u32 rest = threadIdx.x + HELD * blockDim.x, forward = 127;
    if (!IS_BF16) {
        float largest = 0.0f;
#pragma unroll
        for (int k = 0; k < HELD; k++) largest = fmaxf(largest, magnitude(held[k]));
#pragma unroll 1
        for (u32 i = rest; i < cols; i += blockDim.x) largest = fmaxf(largest, magnitude(x[i]));
        forward = forward_exponent(block_max(largest));
    }
    auto rounded = [&](float x) { return IS_BF16 ? float_to_bf16(x) : float_to_half(__fmul_rn(x, power(forward))); };
#pragma unroll
    for (int k = 0; k < HELD; k++)
        if (threadIdx.x + k * blockDim.x < cols) to[threadIdx.x + k * blockDim.x] = rounded(held[k]);
#pragma unroll 1
    for (u32 i = rest; i < cols; i += blockDim.x) to[i] = rounded(x[i]);
#pragma unroll 1
    for (u32 i = cols + threadIdx.x; i < num_groups(cols) * 256; i += blockDim.x) to[i] = 0;
    __syncthreads();
    return power(254 - forward);
}

// The expert of a pair. Every block selects the experts of its row again, because that takes less time than another
// launch; one block of each row writes them for the kernels that follow.
DEVICE u32 route_pair(const ExpertProduct& p, u32 pair) {
    __shared__ u32 experts[32];
    __shared__ float weights[32];
    u32 selected = p.route.num_selected, row = pair / selected, lane = threadIdx.x;
    if (lane < 32) {
        Route route = p.route;
        route.logits += (u64)row * route.num_experts;
        route.experts = experts;
        route.weights = weights;
        route_row<true>(route, 0, 0, 0);
        __syncwarp();
        if (pair == row * selected && blockIdx.y == 0 && lane < selected) {
            p.route.experts[pair + lane] = experts[lane];
            p.route.weights[pair + lane] = weights[lane];
        }
    }
    __syncthreads();
    return experts[pair - row * selected];
}

// Adds up the results of a row as `add_experts` does, if this is the last of the blocks that have some of its outputs:
// those of `first` and of every `stride` after it, `count` at a time.
DEVICE void add_pairs(const ExpertProduct& p, u32 pair, u32 first, u32 count, u32 stride) {
    __shared__ bool is_last;
    u32 selected = p.route.num_selected, row = pair / selected;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32* arrived = p.arrived + row * gridDim.y + blockIdx.y;
        is_last = atomicAdd(arrived, 1) == selected - 1;
        if (is_last) *arrived = 0;
        __threadfence();
    }
    __syncthreads();
    if (!is_last || threadIdx.x >= count) return;
    for (u32 output = first + threadIdx.x; output < p.outputs; output += stride) {
        const float* from = p.out + (u64)row * selected * p.outputs + output;
        u64 place = (u64)row * p.outputs + output;
        float before = p.residual ? p.residual[place] : 0.0f, total = 0.0f;
#pragma unroll 8
        for (u32 k = 0; k < selected; k++)
            total = __fadd_rn(total, __fmul_rn(p.route.weights[row * selected + k], __ldcg(from + (u64)k * p.outputs)));
        p.sum[place] = total;
        if (p.residual) p.residual[place] = __fadd_rn(before, total);
    }
}

// One pair: blockIdx.x. A warp takes a slice of a part of a tile. The block takes a set of tiles, as many as it has
// warps for, and every gridDim.y-th set after it, whose weights are prefetched while the set before is multiplied.
template <int F, u32 PARTS>
DEVICE void expert_pair(const ExpertProduct& p) {
    typedef Weights<F> W;
    extern __shared__ __align__(16) u16 operand[];
    __shared__ float partial[2][EXPERT_WARPS][16];
    begin();
    u32 pair = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const float* x = p.x_plain + (u64)(pair / p.pairs_a_row) * p.cols;
    float held[HELD];
#pragma unroll
    for (int k = 0; k < HELD; k++) held[k] =
        threadIdx.x + k * blockDim.x < p.cols ? x[threadIdx.x + k * blockDim.x] : 0.0f;
    const ExpertWeights& expert = p.experts[PARTS == 2 && p.route.num_selected ? route_pair(p, pair) : p.chosen[pair]];
    u32 tile_warps = p.slices * PARTS, tiles_at_once = EXPERT_WARPS / tile_warps, stride = gridDim.y * tiles_at_once;
    u32 first = blockIdx.y * tiles_at_once, tile = first + warp / tile_warps, num_tiles = (p.outputs + 15) / 16;
    u32 first_output = first * 16;
    u32 slice = warp % p.slices, begin_group = slice_start(p.cols, p.slices, slice), end_group = slice_start(p.cols,
        p.slices, slice + 1);
    const u8* matrix = expert.weight[p.first_part + warp / p.slices % PARTS];
    const u8* weights = group_weights<W>(matrix, tile, begin_group, p.cols);
    typename W::Raw raw[4];
    if (tile < num_tiles)
#pragma unroll
        for (int i = 0; i < 4; i++) W::template load<FromDevice>(raw[i], chunk_of<W>(weights, i), i, lane);
    float scale = pair_operand<F == BF16>(x, p.cols, held, operand);

    for (u32 round = 0; first < num_tiles; first += stride, tile += stride, round ^= 1) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        // Every lane has columns of the one row; the results of the mma for its seven copies are not used.
        const u16* from = operand + begin_group * 256 + 2 * t;
        for (u32 group = begin_group; group < end_group && tile < num_tiles; group++) {
            bool is_last = group + 1 == end_group, has_more = !is_last || tile + stride < num_tiles;
            weights = is_last ? group_weights<W>(matrix, tile + stride, begin_group,
                p.cols) : weights + group_stride<W>();
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 a[4][4];
#pragma unroll
                for (int s = 0; s < 4; s++) W::decode(a[s], raw[i], s);
                if (has_more) W::template load<FromDevice>(raw[i], chunk_of<W>(weights, i), i, lane);
#pragma unroll
                for (int s = 0; s < 4; s++) multiply<F>(sum, a[s], *(const u32*)(from + s * 16),
                    *(const u32*)(from + s * 16 + 8));
                from += 64;
            }
        }
        if (t == 0) {
            partial[round][warp][g] = grown<W>(sum[0]);
            partial[round][warp][g + 8] = grown<W>(sum[2]);
        }
        __syncthreads();
        u32 of_tile = threadIdx.x / 16 * tile_warps, output = first * 16 + threadIdx.x;
        if (threadIdx.x >= tiles_at_once * 16 || output >= p.outputs) continue;
        float value[PARTS];
#pragma unroll
        for (u32 k = 0; k < PARTS; k++) {
            float total = partial[round][of_tile + k * p.slices][threadIdx.x % 16];
            for (u32 n = 1; n < p.slices; n++) total = __fadd_rn(total,
                partial[round][of_tile + k * p.slices + n][threadIdx.x % 16]);
            value[k] = finished(total, scale, expert.bias[p.first_part + k], output);
        }
        write_expert<PARTS>(p, pair, output, value);
    }
    if (PARTS == 1 && p.arrived) add_pairs(p, pair, first_output, tiles_at_once * 16, stride * 16);
}

// Weights of f32, multiplied as in `linear_f32`: a warp for each output and item of at most eight rows.
template <u32 PARTS>
DEVICE void expert_outputs(const ExpertProduct& p) {
    static const u32 ITEM_ROWS = 8;
    begin();
    ExpertItem item = p.items[blockIdx.x];
    if (blockIdx.x >= *p.num_items) return;
    const ExpertWeights& expert = p.experts[item.expert];
    u32 lane = threadIdx.x % 32, output = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    if (output >= p.outputs) return;
    u32 pairs[ITEM_ROWS];
#pragma unroll
    for (u32 i = 0; i < ITEM_ROWS; i++) pairs[i] = p.order[item.first + min(i, item.count - 1)];
    float sum[PARTS][ITEM_ROWS];
#pragma unroll
    for (u32 k = 0; k < PARTS; k++)
#pragma unroll
        for (u32 i = 0; i < ITEM_ROWS; i++) sum[k][i] = 0.0f;
    for (u32 col = lane; col < p.cols; col += 32) {
        float weight[PARTS];
#pragma unroll
        for (u32 k = 0; k < PARTS; k++) weight[k] =
            ((const float*)expert.weight[p.first_part + k])[(u64)output * p.cols + col];
#pragma unroll
        for (u32 i = 0; i < ITEM_ROWS; i++) {
            float x = p.x_plain[(u64)(pairs[i] / p.pairs_a_row) * p.cols + col];
#pragma unroll
            for (u32 k = 0; k < PARTS; k++) sum[k][i] = __fmaf_rn(weight[k], x, sum[k][i]);
        }
    }
#pragma unroll
    for (u32 i = 0; i < ITEM_ROWS; i++) {
        float value[PARTS];
#pragma unroll
        for (u32 k = 0; k < PARTS; k++) {
            const float* bias = expert.bias[p.first_part + k];
            value[k] = warp_sum(sum[k][i]);
            if (bias) value[k] = __fadd_rn(value[k], bias[output]);
        }
        if (lane == 0 && i < item.count) write_expert<PARTS>(p, pairs[i], output, value);
    }
}

#define EXPERTS(NAME, F)                                                                                           \
    KERNEL void __launch_bounds__(512, 1) expert_gated_##NAME(ExpertProduct p) { expert_tiles<F, 2, 1>(p); }   \
    KERNEL void __launch_bounds__(512, 1) expert_down_##NAME(ExpertProduct p) { expert_tiles<F, 1, 1>(p); }    \
    KERNEL void __launch_bounds__(512, 1) expert_gated32_##NAME(ExpertProduct p) { expert_tiles<F, 2, 4>(p); } \
    KERNEL void __launch_bounds__(512, 1) expert_down32_##NAME(ExpertProduct p) { expert_tiles<F, 1, 4>(p); }  \
    KERNEL void __launch_bounds__(512, 1) expert_pair_gated_##NAME(ExpertProduct p) { expert_pair<F, 2>(p); }  \
    KERNEL void __launch_bounds__(512, 1) expert_pair_down_##NAME(ExpertProduct p) { expert_pair<F, 1>(p); }

EXPERTS(f16, F16)
EXPERTS(bf16, BF16)
EXPERTS(q8_0, Q8_0)
EXPERTS(q4_0, Q4_0)
EXPERTS(q4_k, Q4_K)
EXPERTS(q5_k, Q5_K)
EXPERTS(q6_k, Q6_K)
EXPERTS(mxfp4, MXFP4)

KERNEL void __launch_bounds__(256) expert_gated_f32(ExpertProduct p) { expert_outputs<2>(p); }
KERNEL void __launch_bounds__(256) expert_down_f32(ExpertProduct p) { expert_outputs<1>(p); }

struct AddExperts {
    const float* y;        // [pairs][cols]
    const float* weights;  // weight of each pair
    float* out;            // [rows][cols]
    float* residual;       // the sum is added to this too, unless null
    u32 cols, num_selected;
};

// The weighted sum of the pairs of a row in ascending order of their experts, to the bit as `add_weighted` adds them
// one after the other. blockIdx: x = columns, y = row.
KERNEL void add_experts(AddExperts a) {
    begin();
    u32 col = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (col >= a.cols) return;
    float total = 0.0f;
    for (u32 k = 0; k < a.num_selected; k++) {
        u64 pair = (u64)row * a.num_selected + k;
        total = __fadd_rn(total, __fmul_rn(a.weights[pair], a.y[pair * a.cols + col]));
    }
    u64 place = (u64)row * a.cols + col;
    a.out[place] = total;
    if (a.residual) a.residual[place] = __fadd_rn(a.residual[place], total);
}
