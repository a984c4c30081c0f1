// Linear maps of any number of rows: out[r][o] = sum over k of x[r][k] w[o][k], plus bias[o]. x is [rows][cols], w
// [outputs][cols] in any format, out [rows][outputs] in f32.
//
// The order of the sums is the same for any number of rows, here and in the other files of this folder. The columns are
// cut into `slices` at multiples of 256 that depend on their number alone. Within a slice the tensor core adds steps of
// 16 columns in ascending order to f32 accumulators; the sums of the slices are added in ascending order; then come the
// row's factor (a power of two) and the bias. `linear_few` gives the slices to the warps of a block, `linear_many`
// takes them one after the other or gives them to blocks: the same sums, hence the same bits.
//
// Bytes moved: the weights once for each block of rows, x once for every 128 outputs. Bound: the tensor cores, with
// enough rows.

// Any number of rows. A block takes 128 outputs and 8 * NT * WARPS_N rows: four warps by WARPS_N, each with two tiles
// of outputs. Rows of x pass through shared memory, STAGES units deep; weights are loaded into registers, one unit
// ahead. blockIdx: x = rows, y = outputs, z = slice when slices are given to blocks.
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
    u32 begin_unit = 4 * slice_start(p.cols, p.slices, begin_slice), end_unit = 4 * slice_start(p.cols, p.slices,
        end_slice);
    u32 slice_end = 4 * slice_start(p.cols, p.slices, begin_slice + 1), slice = begin_slice;

    auto fetch = [&](u32 unit) {
        if (unit < end_unit) {
            u32 stage = base + unit % STAGES * (ROWS * ROW_BYTES);
            for (u32 i = threadIdx.x; i < ROWS * 8; i += THREADS) {
                u32 row = i / 8;
                bool valid = first_row + row < p.num_rows;
                const u16* from = p.x.numbers + operand_place(valid ? first_row + row : 0, unit * 64 + i % 8 * 8,
                    p.x.pitch);
                copy_async(stage + row * ROW_BYTES + i % 8 * 16, from, valid);
            }
        }
        copy_async_commit();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) fetch(begin_unit + i);
    typename W::Raw raw[2], next[2];
#pragma unroll
    for (int m = 0; m < 2; m++) W::template load<FromDevice>(raw[m],
        chunk_of<W>(weights[m] + (u64)(begin_unit / 4) * group_stride<W>(), begin_unit % 4), begin_unit % 4, lane);

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
            for (int m = 0; m < 2; m++) W::template load<FromDevice>(next[m],
                chunk_of<W>(weights[m] + (u64)((unit + 1) / 4) * group_stride<W>(), (unit + 1) % 4), (unit + 1) % 4,
                lane);
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
                    slice_sums(p, blockIdx.z)[(u64)row * slice_width(p)
                        + (first_tile + m) * 16 + g + i / 2 * 8] = grown<W>(total[m][n][i]);
                else
                    part.out[(u64)row * part.outputs + o] = finished(grown<W>(total[m][n][i]), p.x.scales[row],
                        part.bias, o);
            }
    }
}

DEVICE float4 sum_of(const float4& a, const float4& b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

// Adds the slices that blocks computed; a thread for every four values.
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

#define LINEAR_MANY(NAME, F)                                                                                  \
    KERNEL void __launch_bounds__(128) linear_many16_##NAME(Linear p) { many<F, 1, 2>(p, p.workspace != 0); }  \
    KERNEL void __launch_bounds__(128) linear_many32_##NAME(Linear p) { many<F, 1, 4>(p, p.workspace != 0); }  \
    KERNEL void __launch_bounds__(128) linear_many64_##NAME(Linear p) { many<F, 1, 8>(p, p.workspace != 0); }  \
    KERNEL void __launch_bounds__(256) linear_many128_##NAME(Linear p) { many<F, 2, 8>(p, p.workspace != 0); }

LINEAR_MANY(f16, F16)
LINEAR_MANY(bf16, BF16)
LINEAR_MANY(q8_0, Q8_0)
LINEAR_MANY(q4_0, Q4_0)
LINEAR_MANY(q4_k, Q4_K)
LINEAR_MANY(q5_k, Q5_K)
LINEAR_MANY(q6_k, Q6_K)

// Weights, products and sums in f32: a warp for each output and eight rows. Lane l takes the columns l, l + 32, ...
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
    // TOGETHER loads are in flight at once. Zeros are added beyond the last column, which does not change a sum.
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
