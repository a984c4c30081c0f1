// out[r][o] = sum over k of x[r][k] w[o][k], plus bias[o], for rows x of f32 and weights of every format.
//
// One definition for any number of rows. The columns are cut into `slices` at multiples of 256 that depend on their number alone. Within
// a slice the tensor core adds steps of 16 columns in ascending order to f32 accumulators; the slices' sums are added in ascending
// order; then come the row's factor (a power of two) and the bias. `linear_few` gives the slices to the warps of a block,
// `linear_many` takes them one after the other or gives them to blocks: the same sums, hence the same bits.
//
// Bytes moved for few rows: the weights once, and nothing else of that size: the bound is memory. For many rows the bound is the tensor core.

// The operand of a row in shared memory, made of x itself: as `make_operand` and `rms_norm` do it, to the bit.
DEVICE void few_operand(const Linear& p, u32 row, bool is_bf16, u16* to, float& scale) {
    const float* x = p.x_plain + (u64)row * p.cols;
    float factor = 1.0f;
    if (p.norm_weight) {
        // The threads of `rms_norm`, whose number fixes the order of the sums, are played by fewer.
        __shared__ float parts[32];
        __syncthreads();
        for (u32 thread = threadIdx.x; thread < p.norm_threads; thread += 256) {
            float sum = 0.0f;
#pragma unroll 4
            for (u32 i = thread; i < p.cols; i += p.norm_threads) sum = __fmaf_rn(x[i], x[i], sum);
            sum = warp_sum(sum);
            if (thread % 32 == 0) parts[thread / 32] = sum;
        }
        __syncthreads();
        float sum = warp_sum(threadIdx.x % 32 < p.norm_threads / 32 ? parts[threadIdx.x % 32] : 0.0f);
        factor = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)p.cols), p.eps)));
    }
    auto value = [&](u32 i) { return p.norm_weight ? __fmul_rn(__fmul_rn(x[i], factor), p.norm_weight[i]) : x[i]; };
    u32 forward = 127;
    if (!is_bf16) {
        float largest = 0.0f;
#pragma unroll 8
        for (u32 i = threadIdx.x; i < p.cols; i += 256) largest = fmaxf(largest, magnitude(value(i)));
        forward = forward_exponent(block_max(largest));
    }
    scale = is_bf16 ? 1.0f : power(254 - forward);
    bool writes = p.norm_weight && blockIdx.x == 0;
#pragma unroll 8
    for (u32 i = threadIdx.x; i < p.cols; i += 256) {
        float number = value(i);
        to[i] = is_bf16 ? float_to_bf16(number) : float_to_half(__fmul_rn(number, power(forward)));
        if (writes) p.normed[(u64)row * p.cols + i] = number;
    }
    for (u32 i = p.cols + threadIdx.x; i < p.x.pitch; i += 256) to[i] = 0;
}

// Up to 8 rows. A block is 8 warps: `slices` warps share a tile of 16 outputs. A warp sees its groups of all its tiles as one stream and
// loads AHEAD groups ahead, across the edges of tiles: from memory to registers, with loads under way while sums are put together.
template <int F, int AHEAD>
DEVICE void few(const Linear& p) {
    typedef Weights<F> W;
    extern __shared__ uint4 shared[];
    // Two of each, so that one barrier a tile is enough: nobody is two tiles ahead of another.
    __shared__ float partial[2][8][128];
    __shared__ uint4 zeros;
    __shared__ float scales[8];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 tiles_at_once = 8 / p.slices, stride = gridDim.x * tiles_at_once;
    u32 slice = warp % p.slices;
    u32 begin_group = slice_start(p.cols, p.slices, slice), end_group = slice_start(p.cols, p.slices, slice + 1);
    u32 first = blockIdx.x * tiles_at_once;
    // When gated, a tile of the gate and the same tile of up follow each other.
    u32 num_items = p.is_gated ? p.num_tiles / 2 : p.num_tiles;
    u32 rounds = (num_items - first + stride - 1) / stride * (p.is_gated ? 2 : 1);
    u32 total = rounds * (end_group - begin_group);
    auto tile_of = [&](u32 round, u32 which) {
        if (!p.is_gated) return first + round * stride + which;
        u32 item = first + round / 2 * stride + which;
        return item < num_items ? item + round % 2 * num_items : p.num_tiles;
    };

    // A tile beyond the last is computed like the last, and not written.
    auto slice_weights = [&](u32 round) {
        u32 tile = min(tile_of(round, warp / p.slices), p.num_tiles - 1);
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
            float scale;
            few_operand(p, row, F == BF16, (u16*)((u8*)shared + row * row_bytes), scale);
            if (threadIdx.x == 0) scales[row] = scale;
            continue;
        }
        for (u32 i = threadIdx.x; i < vectors; i += 256)
            copy_async(base + row * row_bytes + i * 16, p.x.numbers + operand_place(row, i * 8, p.x.pitch), true);
        if (threadIdx.x == 0) scales[row] = p.x.scales[row];
    }
    copy_async_commit();
    if (threadIdx.x == 0) zeros = make_uint4(0, 0, 0, 0);
    copy_async_wait<0>();
    __syncthreads();

    // Lane i gives the address of row i % 8 in matrix i / 8: the two halves of one step, then of the next.
    bool valid = lane % 8 < p.num_rows;
    u32 my_row = valid ? base + lane % 8 * row_bytes + lane / 8 * 16 : shared_address(&zeros);
    u32 half_unit = valid ? 64 : 0;

    u32 group = begin_group, round = 0;
    float gate = 0.0f;
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
                if (to_load > 0) W::template load<FromDevice>(raw[h][i], chunk_of<W>(weights, i), i, lane);
            }
            if (to_load > 0) next_group();
            if (++group < end_group) continue;

            group = begin_group;
            u32 g = lane / 4, t = lane % 4;
            float* mine = partial[round % 2][warp];  // [row of x][output of the tile]
            mine[2 * t * 16 + g] = sum[0];
            mine[(2 * t + 1) * 16 + g] = sum[1];
            mine[2 * t * 16 + g + 8] = sum[2];
            mine[(2 * t + 1) * 16 + g + 8] = sum[3];
            sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
            __syncthreads();
            for (u32 j = threadIdx.x; j < tiles_at_once * 16 * p.num_rows; j += 256) {
                u32 row = j / (tiles_at_once * 16), o = j % (tiles_at_once * 16);
                u32 which = o / 16, tile = tile_of(round, which);
                if (tile >= p.num_tiles) continue;
                float (*of_tile)[128] = &partial[round % 2][which * p.slices];
                float result = of_tile[0][row * 16 + o % 16];
                for (u32 n = 1; n < p.slices; n++) result = __fadd_rn(result, of_tile[n][row * 16 + o % 16]);
                const LinearPart& part = part_of(p, tile);
                u32 output = (tile - part.first_tile) * 16 + o % 16;
                if (output >= part.outputs) continue;
                u64 place = (u64)row * part.outputs + output;
                result = finished(result, scales[row], part.bias, output);
                if (p.is_gated && round % 2 == 0) {
                    gate = result;
                    continue;
                }
                part.out[place] = result;
                if (p.is_gated) p.parts[0].out[place] = __fmul_rn(activated(p.activation, gate), result);
                if (p.residual) p.residual[place] = __fadd_rn(p.residual[place], result);
            }
            round++;
        }
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
                    p.workspace[((u64)blockIdx.z * p.num_rows + row) * (p.num_tiles * 16) + (first_tile + m) * 16 + g + i / 2 * 8] = total[m][n][i];
                else
                    part.out[(u64)row * part.outputs + o] = finished(total[m][n][i], p.x.scales[row], part.bias, o);
            }
    }
}

// Adds the slices that blocks computed; a thread for each number.
KERNEL void linear_combine(Linear p) {
    begin();
    u64 width = p.num_tiles * 16, i = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    if (i >= p.num_rows * width) return;
    u32 row = i / width, column = i % width;
    const LinearPart& part = part_of(p, column / 16);
    u32 o = column - part.first_tile * 16;
    if (o >= part.outputs) return;
    float total = p.workspace[i];
    for (u32 s = 1; s < p.slices; s++) total = __fadd_rn(total, p.workspace[s * (p.num_rows * width) + i]);
    part.out[(u64)row * part.outputs + o] = finished(total, p.x.scales[row], part.bias, o);
}

// AHEAD and the blocks that must fit on a multiprocessor at once share out its 64 Ki registers.
#define LINEAR(NAME, F, AHEAD, BLOCKS)                                                                      \
    KERNEL void __launch_bounds__(256, BLOCKS) linear_few_##NAME(Linear p) { few<F, AHEAD>(p); }              \
    KERNEL void __launch_bounds__(128) linear_many16_##NAME(Linear p) { many<F, 1, 2>(p, p.workspace != 0); }  \
    KERNEL void __launch_bounds__(128) linear_many32_##NAME(Linear p) { many<F, 1, 4>(p, p.workspace != 0); }  \
    KERNEL void __launch_bounds__(128) linear_many64_##NAME(Linear p) { many<F, 1, 8>(p, p.workspace != 0); }  \
    KERNEL void __launch_bounds__(256) linear_many128_##NAME(Linear p) { many<F, 2, 8>(p, p.workspace != 0); }

LINEAR(f16, F16, 1, 2)
LINEAR(bf16, BF16, 1, 2)
LINEAR(q8_0, Q8_0, 1, 3)
LINEAR(q4_0, Q4_0, 1, 3)
LINEAR(q4_k, Q4_K, 1, 3)
LINEAR(q5_k, Q5_K, 1, 3)
LINEAR(q6_k, Q6_K, 1, 3)

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
    for (u32 k = lane; k < p.cols; k += 32) {
        float weight = w[k];
#pragma unroll
        for (int r = 0; r < 8; r++)
            if (first + r < p.num_rows) sum[r] = __fmaf_rn(weight, x[(u64)(first + r) * p.cols + k], sum[r]);
    }
#pragma unroll
    for (int r = 0; r < 8; r++) {
        float total = warp_sum(sum[r]);
        if (lane == 0 && first + r < p.num_rows)
            part.out[(u64)(first + r) * part.outputs + o] = part.bias ? __fadd_rn(total, part.bias[o]) : total;
    }
}
