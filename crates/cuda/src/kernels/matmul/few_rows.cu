// Linear maps of up to 8 rows: out[r][o] = sum over k of x[r][k] w[o][k], plus bias[o]. x is [rows][cols] in f32, w
// [outputs][cols] in any format, out [rows][outputs] in f32. The order of the sums is that of many_rows.cu, so the bits
// are the same.
//
// Bytes moved: the weights once, and little else. Bound: memory bandwidth.

static const u32 FEW_WARPS = 16;
static const u32 FEW_THREADS = 32 * FEW_WARPS;

// The factor of the RMSNorm of a row.
DEVICE float few_norm_factor(const Linear& p, const float4* x) {
    __shared__ float parts[32];
    u32 vectors = p.cols / 4;
    if (threadIdx.x < 256) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
        for (u32 i = threadIdx.x; i < vectors; i += 256) {
            add_squares(sum, x[i]);
        }
        float total = norm_part(sum);
        if (threadIdx.x % 8 == 0) parts[threadIdx.x / 8] = total;
    }
    __syncthreads();
    return norm_factor(parts, p.cols, p.eps);
}

// Makes the operand of a row in shared memory from x, to the bit as `rms_norm` and `make_operand` do. Returns the row's
// factor.
template <bool IS_BF16>
DEVICE float few_operand(const Linear& p, u32 row, u8* to) {
    const float4* x = (const float4*)(p.x_plain + (u64)row * p.cols);
    const float4* weight = (const float4*)p.norm_weight;
    u32 vectors = p.cols / 4;
    float factor = weight ? few_norm_factor(p, x) : 1.0f;
    auto value = [&](u32 i) {
        float4 v = x[i];
        if (!weight) return v;
        return normed(v, factor, weight[i]);
    };
    // Two vectors of a thread stay in registers; there are seldom more.
    float4 held[2];
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
        u32 i = threadIdx.x + k * FEW_THREADS;
        held[k] = i < vectors ? value(i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    u32 forward = 127;
    if (!IS_BF16) {
        float largest = 0.0f;
        auto look = [&](const float4& v) {
            largest = largest_of(largest, v);
        };
        if (p.maxima_are == 1) {
            largest = __uint_as_float(p.maxima[row]);
        } else {
            look(held[0]);
            look(held[1]);
#pragma unroll 4
            for (u32 i = threadIdx.x + 2 * FEW_THREADS; i < vectors; i += FEW_THREADS) look(value(i));
            largest = block_max(largest);
        }
        forward = forward_exponent(largest);
    }
    float by = power(forward);
    auto put = [&](u32 i, const float4& v) {
        uint2 numbers;
        if (IS_BF16)
            numbers = make_uint2(float_to_bf16(v.x) | (u32)float_to_bf16(v.y) << 16,
                float_to_bf16(v.z) | (u32)float_to_bf16(v.w) << 16);
        else
            numbers = half_vector(v, by);
        *(uint2*)(to + i * 8) = numbers;
        if (weight && blockIdx.x == 0) ((float4*)(p.normed + (u64)row * p.cols))[i] = v;
    };
#pragma unroll
    for (u32 k = 0; k < 2; k++)
        if (threadIdx.x + k * FEW_THREADS < vectors) put(threadIdx.x + k * FEW_THREADS, held[k]);
#pragma unroll 4
    for (u32 i = threadIdx.x + 2 * FEW_THREADS; i < vectors; i += FEW_THREADS) put(i, value(i));
#pragma unroll 1
    for (u32 i = vectors + threadIdx.x; i < p.x.pitch / 4; i += FEW_THREADS) *(uint2*)(to + i * 8) = make_uint2(0, 0);
    return power(254 - forward);
}

// Up to 8 rows. A block is 16 warps; `slices` warps share a tile of 16 outputs. A warp reads the groups of all its
// tiles as one stream and loads AHEAD groups ahead into registers, across the edges of tiles, so that loads are under
// way while sums are added up.
template <int F, int AHEAD>
DEVICE void few(const Linear& p) {
    typedef Weights<F> W;
    extern __shared__ uint4 shared[];
    // Two buffers, so that one barrier a tile is enough: no warp is two tiles ahead of another.
    __shared__ float partial[2][FEW_WARPS][128];
    __shared__ uint4 zeros;
    __shared__ float scales[8];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 which = warp >> logarithm(p.slices), slice = warp % p.slices;
    u32 begin_group = slice_start(p.cols, p.slices, slice), end_group = slice_start(p.cols, p.slices, slice + 1);
    // An item is a tile or, when gated, a tile of the gate and the same tile of up. The last round has fewer items than
    // run at once: they are distributed over all blocks first.
    u32 tiles_of_item = p.is_gated ? 2 : 1, num_items = p.num_tiles / tiles_of_item;
    u32 items_log = logarithm(FEW_WARPS / tiles_of_item) - logarithm(p.slices), items_at_once = 1 << items_log,
        stride = items_at_once * gridDim.x;
    auto item_of = [&](u32 round, u32 index) { return round * stride + index * gridDim.x + blockIdx.x; };
    auto rounds_of = [&](u32 index) {
        u32 first = item_of(0, index);
        return first < num_items ? (num_items - first + stride - 1) / stride : 0;
    };
    u32 rounds = rounds_of(0), total = rounds_of(which / tiles_of_item) * (end_group - begin_group);

    auto slice_weights = [&](u32 round) {
        u32 tile = min(item_of(round, which / tiles_of_item), num_items - 1) + which % tiles_of_item * num_items;
        const LinearPart& part = part_of(p, tile);
        return group_weights<W>(part.weight, tile - part.first_tile, begin_group, p.cols);
    };
    u32 load_round = 0, load_group = begin_group, to_load = total;
    const u8* weights = slice_weights(0);
    typename W::Raw raw[AHEAD][4];
    auto next_group = [&]() {
        to_load--;
        weights += group_stride<W>();
        if (++load_group == end_group) {
            load_group = begin_group;
            weights = slice_weights(++load_round);
        }
    };
    let_next_start();
#pragma unroll
    for (int h = 0; h < AHEAD; h++) {
        if (to_load == 0) break;
#pragma unroll
        for (int i = 0; i < 4; i++) W::template load<FromDevice>(raw[h][i], chunk_of<W>(weights, i), i, lane);
        next_group();
    }

    wait_for_previous();
    // Rows of x have a pitch of 16 bytes more than a multiple of 128, so that eight rows lie in different banks.
    u32 row_bytes = p.x.pitch * 2 + 16;
    u32 vectors = p.x.pitch / 8;
    u32 base = shared_address(shared);
    for (u32 row = 0; row < p.num_rows; row++) {
        if (p.makes_operand) {
            float scale = few_operand<F == BF16>(p, row, (u8*)shared + row * row_bytes);
            if (threadIdx.x == 0) scales[row] = scale;
            continue;
        }
        for (u32 i = threadIdx.x; i < vectors; i += FEW_THREADS)
            copy_async(base + row * row_bytes + i * 16, p.x.numbers + operand_place(row, i * 8, p.x.pitch), true);
        if (threadIdx.x == 0) scales[row] = p.x.scales[row];
    }
    copy_async_commit();
    if (threadIdx.x == 0) zeros = make_uint4(0, 0, 0, 0);
    if (p.maxima_are == 3 && blockIdx.x == 0 && threadIdx.x < p.num_rows) p.maxima[threadIdx.x] = 0;
    copy_async_wait<0>();
    __syncthreads();

    // Lane i has the address of row i % 8 in matrix i / 8: the two halves of one step, then of the next.
    bool valid = lane % 8 < p.num_rows;
    u32 my_row = valid ? base + lane % 8 * row_bytes + lane / 8 * 16 : shared_address(&zeros);
    u32 half_unit = valid ? 64 : 0;

    // Adds up the slices of a round's tiles and writes the results.
    auto finish = [&](u32 round) {
        auto result_of = [&](u32 tile, u32 row, const LinearPart& part, u32 output) {
            const float* sums = partial[round % 2][tile * p.slices] + row * 16 + output % 16;
            float of_slices[MAX_SLICES];
#pragma unroll
            for (u32 n = 0; n < MAX_SLICES; n++)
                if (n < p.slices) of_slices[n] = sums[n * 128];
#pragma unroll
            for (u32 n = 1; n < MAX_SLICES; n++)
                if (n < p.slices) of_slices[0] = __fadd_rn(of_slices[0], of_slices[n]);
            return finished(of_slices[0], scales[row], part.bias, output);
        };
        for (u32 j = threadIdx.x; j < items_at_once * 16 * p.num_rows; j += FEW_THREADS) {
            u32 row = j / 16 >> items_log, index = j / 16 % items_at_once, item = item_of(round, index);
            if (item >= num_items) continue;
            const LinearPart& part = part_of(p, item);
            u32 output = (item - part.first_tile) * 16 + j % 16;
            if (output >= part.outputs) continue;
            u64 place = (u64)row * part.outputs + output;
            float result = result_of(index * tiles_of_item, row, part, output);
            if (p.is_gated) {
                float up = result_of(index * tiles_of_item + 1, row, p.parts[1], output);
                p.parts[1].out[place] = up;
                result = gated(p.activation, result, up);
                // Magnitudes are not negative, so their bits compare as the values do.
                if (p.maxima_are == 2) atomicMax(p.maxima + row, __float_as_uint(magnitude(result)));
            }
            part.out[place] = result;
            if (p.residual) p.residual[place] = __fadd_rn(p.residual[place], result);
        }
    };

    u32 group = begin_group, round = 0;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (u32 done = 0; done < total; done += AHEAD) {
#pragma unroll
        for (int h = 0; h < AHEAD; h++) {
            if (done + h >= total) break;
            u32 at = my_row + group * 8 * half_unit;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 x[8];
                load_matrices(*(u32(*)[4])x, at);
                load_matrices(*(u32(*)[4])(x + 4), at + half_unit);
                at += 2 * half_unit;
#pragma unroll
                for (int s = 0; s < 4; s++) {
                    u32 a[4];
                    W::decode(a, raw[h][i], s);
                    multiply<F>(sum, a, x[2 * s], x[2 * s + 1]);
                }
                if (AHEAD == 1 && to_load > 0) W::template load<FromDevice>(raw[h][i], chunk_of<W>(weights, i), i,
                    lane);
            }
            // The loads of a group start together: a warp can wait for at most six sets of loads, and for a set only as
            // a whole.
            if (AHEAD > 1 && to_load > 0)
#pragma unroll
                for (int i = 0; i < 4; i++) W::template load<FromDevice>(raw[h][i], chunk_of<W>(weights, i), i, lane);
            if (to_load > 0) next_group();
            if (++group < end_group) continue;

            group = begin_group;
            u32 g = lane / 4, t = lane % 4;
            float* mine = partial[round % 2][warp];  // [row of x][output of the tile]
            mine[2 * t * 16 + g] = grown<W>(sum[0]);
            mine[(2 * t + 1) * 16 + g] = grown<W>(sum[1]);
            mine[2 * t * 16 + g + 8] = grown<W>(sum[2]);
            mine[(2 * t + 1) * 16 + g + 8] = grown<W>(sum[3]);
            sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
            __syncthreads();
            finish(round++);
        }
    }
    // Warps without a tile in the last round help to write the others'.
    if (round < rounds) {
        __syncthreads();
        finish(round);
    }
}

// A block has a multiprocessor to itself: AHEAD groups of weights are loaded into its registers ahead of their use.
#define LINEAR_FEW(NAME, F, AHEAD) \
    KERNEL void __launch_bounds__(512, 1) linear_few_##NAME(Linear p) { few<F, AHEAD>(p); }

LINEAR_FEW(f16, F16, 1)
LINEAR_FEW(bf16, BF16, 1)
LINEAR_FEW(q8_0, Q8_0, 2)
LINEAR_FEW(q4_0, Q4_0, 3)
LINEAR_FEW(q4_k, Q4_K, 2)
LINEAR_FEW(q5_k, Q5_K, 2)
LINEAR_FEW(q6_k, Q6_K, 2)
LINEAR_FEW(mxfp4, MXFP4, 3)
