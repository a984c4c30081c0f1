// out[r][o] = sum over k of x[r][k] w[o][k], plus bias[o], for rows x of f32 and weights of every format.
//
// One definition for any number of rows. The columns are cut into `slices` at multiples of 256 that depend on their number alone. Within
// a slice the tensor core adds steps of 16 columns in ascending order to f32 accumulators; the slices' sums are added in ascending
// order; then come the row's factor (a power of two) and the bias. `linear_few` gives the slices to the warps of a block,
// `linear_many` takes them one after the other or gives them to blocks: the same sums, hence the same bits.
//
// Bytes moved for few rows: the weights once, and nothing else of that size: the bound is memory. For many rows the bound is the tensor core.

static const u32 FEW_WARPS = 16;
static const u32 FEW_THREADS = 32 * FEW_WARPS;

// The factor of `rms_norm`, to the bit, for rows that its 1024 threads share. 256 threads play four each: their numbers are neighbours, so
// that the last two steps of the sum over 32 threads fall within one.
DEVICE float few_norm_factor(const Linear& p, const float4* x) {
    __shared__ float parts[32];
    u32 vectors = p.cols / 4;
    if (threadIdx.x < 256) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
        for (u32 i = threadIdx.x; i < vectors; i += 256) {
            float4 v = x[i];
            sum[0] = __fmaf_rn(v.x, v.x, sum[0]);
            sum[1] = __fmaf_rn(v.y, v.y, sum[1]);
            sum[2] = __fmaf_rn(v.z, v.z, sum[2]);
            sum[3] = __fmaf_rn(v.w, v.w, sum[3]);
        }
#pragma unroll
        for (int distance = 4; distance > 0; distance /= 2)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(FULL_WARP, sum[i], distance));
        float total = __fadd_rn(__fadd_rn(sum[0], sum[2]), __fadd_rn(sum[1], sum[3]));
        if (threadIdx.x % 8 == 0) parts[threadIdx.x / 8] = total;
    }
    __syncthreads();
    float sum = warp_sum(parts[threadIdx.x % 32]);
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)p.cols), p.eps)));
}

// The operand of a row in shared memory, made of x itself: as `make_operand` and `rms_norm` do it, to the bit. Returns the row's factor.
template <bool IS_BF16>
DEVICE float few_operand(const Linear& p, u32 row, u8* to) {
    const float4* x = (const float4*)(p.x_plain + (u64)row * p.cols);
    const float4* weight = (const float4*)p.norm_weight;
    u32 vectors = p.cols / 4;
    float factor = weight ? few_norm_factor(p, x) : 1.0f;
    auto value = [&](u32 i) {
        float4 v = x[i];
        if (!weight) return v;
        float4 w = weight[i];
        return make_float4(__fmul_rn(__fmul_rn(v.x, factor), w.x), __fmul_rn(__fmul_rn(v.y, factor), w.y),
                           __fmul_rn(__fmul_rn(v.z, factor), w.z), __fmul_rn(__fmul_rn(v.w, factor), w.w));
    };
    // Two of them stay in registers; there are seldom more.
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
            largest = fmaxf(largest, fmaxf(fmaxf(magnitude(v.x), magnitude(v.y)), fmaxf(magnitude(v.z), magnitude(v.w))));
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
            numbers = make_uint2(float_to_bf16(v.x) | (u32)float_to_bf16(v.y) << 16, float_to_bf16(v.z) | (u32)float_to_bf16(v.w) << 16);
        else
            numbers = make_uint2(float_to_half(__fmul_rn(v.x, by)) | (u32)float_to_half(__fmul_rn(v.y, by)) << 16,
                                 float_to_half(__fmul_rn(v.z, by)) | (u32)float_to_half(__fmul_rn(v.w, by)) << 16);
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

// Up to 8 rows. A block is 16 warps: `slices` warps share a tile of 16 outputs. A warp sees its groups of all its tiles as one stream and
// loads AHEAD groups ahead, across the edges of tiles: from memory to registers, with loads under way while sums are put together.
template <int F, int AHEAD>
DEVICE void few(const Linear& p) {
    typedef Weights<F> W;
    extern __shared__ uint4 shared[];
    // Two of each, so that one barrier a tile is enough: nobody is two tiles ahead of another.
    __shared__ float partial[2][FEW_WARPS][128];
    __shared__ uint4 zeros;
    __shared__ float scales[8];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 which = warp >> logarithm(p.slices), slice = warp % p.slices;
    u32 begin_group = slice_start(p.cols, p.slices, slice), end_group = slice_start(p.cols, p.slices, slice + 1);
    // An item is a tile, or, when gated, a tile of the gate and the same tile of up, side by side. In the last round there are fewer than
    // the device takes at once: they are shared out over all blocks first.
    u32 tiles_of_item = p.is_gated ? 2 : 1, num_items = p.num_tiles / tiles_of_item;
    u32 items_log = logarithm(FEW_WARPS / tiles_of_item) - logarithm(p.slices), items_at_once = 1 << items_log, stride = items_at_once * gridDim.x;
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
    // Rows of x, 16 bytes apart from a multiple of 128: eight rows then lie in different banks.
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

    // Lane i gives the address of row i % 8 in matrix i / 8: the two halves of one step, then of the next.
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
                // Not negative, so that the bits compare as the numbers do.
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
                if (AHEAD == 1 && to_load > 0) W::template load<FromDevice>(raw[h][i], chunk_of<W>(weights, i), i, lane);
            }
            // A group's loads are begun together: a warp can wait for six sets of them at most, and for a set only as a whole.
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
    // Who had no tile in the last round helps to write those of others.
    if (round < rounds) {
        __syncthreads();
        finish(round);
    }
}

// Any number of rows. A block takes 128 outputs and 8 * NT * WARPS_N rows: four warps by WARPS_N, each two tiles of outputs.
// Rows of x pass through shared memory, STAGES units deep; weights go straight to registers, one unit ahead.
// blockIdx: x = rows, y = outputs, z = slice when slices are given to blocks.
template <int F, int WARPS_N, int NT>
DEVICE void many(const Linear& p, bool split) {
    typedef Weights<F> W;
    static const int ROWS = 8 * NT * WARPS_N;
    static const int THREADS = 128 * WARPS_N;
    static const int STAGES = 4;
    static const u32 ROW_BYTES = 144;
    extern __shared__ uint4 shared[];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 warp_m = warp % 4, warp_n = warp / 4;
    u32 first_row = blockIdx.x * ROWS;
    u32 base = shared_address(shared);

    begin();
    const u8* weights[2];
    bool has[2];
    u32 first_tile = blockIdx.y * 8 + warp_m * 2;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        has[m] = first_tile + m < p.num_tiles;
        const LinearPart& part = part_of(p, first_tile + m);
        weights[m] = group_weights<W>(part.weight, has[m] ? first_tile + m - part.first_tile : 0, 0, p.cols);
    }
    u32 begin_slice = split ? blockIdx.z : 0, end_slice = split ? blockIdx.z + 1 : p.slices;
    u32 begin_unit = 4 * slice_start(p.cols, p.slices, begin_slice), end_unit = 4 * slice_start(p.cols, p.slices, end_slice);
    u32 slice_end = 4 * slice_start(p.cols, p.slices, begin_slice + 1), slice = begin_slice;

    auto fetch = [&](u32 unit) {
        if (unit < end_unit) {
            u32 stage = base + unit % STAGES * (ROWS * ROW_BYTES);
            for (u32 i = threadIdx.x; i < ROWS * 8; i += THREADS) {
                u32 row = i / 8;
                bool valid = first_row + row < p.num_rows;
                const u16* from = p.x.numbers + operand_place(valid ? first_row + row : 0, unit * 64 + i % 8 * 8, p.x.pitch);
                copy_async(stage + row * ROW_BYTES + i % 8 * 16, from, valid);
            }
        }
        copy_async_commit();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) fetch(begin_unit + i);
    typename W::Raw raw[2], next[2];
#pragma unroll
    for (int m = 0; m < 2; m++) W::template load<FromDevice>(raw[m], chunk_of<W>(weights[m] + (u64)(begin_unit / 4) * group_stride<W>(), begin_unit % 4), begin_unit % 4, lane);

    float sum[2][NT][4], total[2][NT][4];
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[m][n][i] = total[m][n][i] = 0.0f;

    u32 my_row = (warp_n * NT * 8 + lane % 8) * ROW_BYTES + lane / 8 * 16;
    for (u32 unit = begin_unit; unit < end_unit; unit++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        fetch(unit + STAGES - 1);
        if (unit + 1 < end_unit)
#pragma unroll
            for (int m = 0; m < 2; m++) W::template load<FromDevice>(next[m], chunk_of<W>(weights[m] + (u64)((unit + 1) / 4) * group_stride<W>(), (unit + 1) % 4), (unit + 1) % 4, lane);
        u32 stage = base + unit % STAGES * (ROWS * ROW_BYTES) + my_row;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 a[2][2][4];
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int s = 0; s < 2; s++) W::decode(a[m][s], raw[m], 2 * h + s);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                u32 x[4];
                load_matrices(x, stage + n * 8 * ROW_BYTES + h * 64);
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    multiply<F>(sum[m][n], a[m][0], x[0], x[1]);
                    multiply<F>(sum[m][n], a[m][1], x[2], x[3]);
                }
            }
        }
        if (unit + 1 == slice_end) {
            bool is_first = slice == begin_slice;
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        total[m][n][i] = is_first ? sum[m][n][i] : __fadd_rn(total[m][n][i], sum[m][n][i]);
                        sum[m][n][i] = 0.0f;
                    }
            slice++;
            slice_end = 4 * slice_start(p.cols, p.slices, slice + 1);
        }
#pragma unroll
        for (int m = 0; m < 2; m++) raw[m] = next[m];
    }

    u32 g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        if (!has[m]) continue;
        const LinearPart& part = part_of(p, first_tile + m);
        u32 tile = first_tile + m - part.first_tile;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 row = first_row + warp_n * NT * 8 + n * 8 + 2 * t + i % 2;
                u32 o = tile * 16 + g + i / 2 * 8;
                if (row >= p.num_rows || o >= part.outputs) continue;
                if (split)
                    slice_sums(p, blockIdx.z)[(u64)row * slice_width(p) + (first_tile + m) * 16 + g + i / 2 * 8] = grown<W>(total[m][n][i]);
                else
                    part.out[(u64)row * part.outputs + o] = finished(grown<W>(total[m][n][i]), p.x.scales[row], part.bias, o);
            }
    }
}

DEVICE float4 sum_of(const float4& a, const float4& b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

// Adds the slices that blocks computed; a thread for each four numbers.
KERNEL void linear_combine(Linear p) {
    begin();
    u64 vectors = slice_width(p) / 4, i = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    if (i >= p.num_rows * vectors) return;
    u32 row = i / vectors, column = i % vectors * 4;
    float4 sums[MAX_SLICES];
#pragma unroll
    for (u32 s = 0; s < MAX_SLICES; s++)
        if (s < p.slices) sums[s] = ((const float4*)slice_sums(p, s))[i];
#pragma unroll
    for (u32 s = 1; s < MAX_SLICES; s++)
        if (s < p.slices) sums[0] = sum_of(sums[0], sums[s]);
    write_four(p, row, column / 16, column % 16, sums[0], p.x.scales[row]);
}

// A block has a multiprocessor to itself; what AHEAD groups take of its registers is on its way from memory.
#define LINEAR(NAME, F, AHEAD)                                                                              \
    KERNEL void __launch_bounds__(512, 1) linear_few_##NAME(Linear p) { few<F, AHEAD>(p); }                    \
    KERNEL void __launch_bounds__(128) linear_many16_##NAME(Linear p) { many<F, 1, 2>(p, p.workspace != 0); }  \
    KERNEL void __launch_bounds__(128) linear_many32_##NAME(Linear p) { many<F, 1, 4>(p, p.workspace != 0); }  \
    KERNEL void __launch_bounds__(128) linear_many64_##NAME(Linear p) { many<F, 1, 8>(p, p.workspace != 0); }  \
    KERNEL void __launch_bounds__(256) linear_many128_##NAME(Linear p) { many<F, 2, 8>(p, p.workspace != 0); }

LINEAR(f16, F16, 1)
LINEAR(bf16, BF16, 1)
LINEAR(q8_0, Q8_0, 2)
LINEAR(q4_0, Q4_0, 3)
LINEAR(q4_k, Q4_K, 2)
LINEAR(q5_k, Q5_K, 2)
LINEAR(q6_k, Q6_K, 2)

// Weights of f32, products and sums in f32: a warp for each output and eight rows. Lane l takes the columns l, l + 32, ...
KERNEL void linear_f32(Linear p) {
    begin();
    const float* x = p.x_plain;
    u32 lane = threadIdx.x % 32;
    u32 o = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const LinearPart& part = p.parts[0];
    if (o >= part.outputs) return;
    const float* w = (const float*)part.weight + (u64)o * p.cols;
    u32 first = blockIdx.y * 8;
    float sum[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    // What is read together does not wait for each other. Beyond the last column zeros are added, which leaves a sum as it is.
    static const u32 TOGETHER = 16;
    for (u32 base = lane; base < p.cols; base += TOGETHER * 32) {
        float weight[TOGETHER];
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) weight[i] = base + i * 32 < p.cols ? w[base + i * 32] : 0.0f;
#pragma unroll
        for (int r = 0; r < 8; r++) {
            if (first + r >= p.num_rows) continue;
            const float* row = x + (u64)(first + r) * p.cols;
            float number[TOGETHER];
#pragma unroll
            for (u32 i = 0; i < TOGETHER; i++) number[i] = base + i * 32 < p.cols ? row[base + i * 32] : 0.0f;
#pragma unroll
            for (u32 i = 0; i < TOGETHER; i++) sum[r] = __fmaf_rn(weight[i], number[i], sum[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < 8; r++) {
        float total = warp_sum(sum[r]);
        if (lane == 0 && first + r < p.num_rows)
            part.out[(u64)(first + r) * part.outputs + o] = part.bias ? __fadd_rn(total, part.bias[o]) : total;
    }
}
