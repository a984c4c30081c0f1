// Linear maps of up to 8 rows with quantized weights, for GPUs with much shared memory a block (compute capability
// 9.0): the arithmetic of few_rows.cu to the bit. out[r][o] = sum over k of x[r][k] w[o][k], plus bias[o]; x is
// [rows][cols], w [outputs][cols].
//
// Bytes moved: the weights once. Bound: memory bandwidth, which needs some 64 KiB in flight for each multiprocessor. A
// warp that loads into registers waits for all its loads at once, so every warp has a ring in shared memory instead,
// which asynchronous copies fill as far ahead as it goes: across the edges of tiles, and before the kernel before this
// one has ended, since weights do not depend on it. Copies of 16 bytes a lane keep up with memory (18.4 us for 65 MB on
// an H200, 74 % of 4.8 TB/s); bulk copies of a chunk each do not (21 to 28 us).
//
// A block is 16 warps. An item is two tiles of 16 outputs: adjacent ones or, when gated, a tile of the gate and the
// same tile of up. `spread` warps share a tile, a slice each; with many tiles, each warp takes whole tiles. (32 warps
// with short rings were no faster.)

static const u32 WARPS = 16, THREADS = 32 * WARPS;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Threads that make the operand of a row: eight warps.
static const u32 GROUP_THREADS = 256;

// Vectors of a row that a thread keeps in registers: all of them, for rows of up to 4,096 values.
static const u32 STREAM_HELD = 4;

// Vectors of a row that a thread keeps in registers when the whole block makes a row: all of them, for rows of up to
// 14,336 values.
static const u32 PLAIN_HELD = 7;

DEVICE void hold_vectors(float4* held, const float4* from, u32 vectors) {
#pragma unroll
    for (u32 k = 0; k < STREAM_HELD; k++) {
        u32 i = threadIdx.x % GROUP_THREADS + k * GROUP_THREADS;
        held[k] = i < vectors ? from[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

// Prefetches values into the L2 cache.
DEVICE void prefetch(const float* numbers, u32 count) {
    for (u32 i = threadIdx.x * 32; i < count;
        i += blockDim.x * 32) asm volatile("prefetch.global.L2 [%0];" ::"l"(numbers + i));
}

// Offset of a pair of values of the operand in shared memory: the eight pairs of a row that a lane needs for a unit are
// adjacent. Lane t of four has the columns 2t, 2t + 1, 2t + 8, 2t + 9 of each step.
DEVICE u32 pair_place(u32 col) { return col / 64 * 128 + col % 8 / 2 * 32 + col % 64 / 8 * 4; }

// Writes a vector of four columns at the address of its first.
DEVICE void put_at(u8* place, uint2 pairs) {
    *(u32*)place = pairs.x;
    *(u32*)(place + 32) = pairs.y;
}

DEVICE void put_vector(u8* row, u32 i, uint2 pairs) { put_at(row + pair_place(4 * i), pairs); }

// Bytes between two vectors that are `vectors`, a number of whole units, apart.
DEVICE u32 vectors_apart(u32 vectors) { return vectors / 16 * 128; }

// A barrier for `count` threads in whole warps.
DEVICE void wait_among(u32 barrier, u32 count) { asm volatile("bar.sync %0, %1;" ::"r"(barrier),
    "r"(count) : "memory"); }

// Maximum vectors that a thread holds: of a row and of the norm's weights in a group of threads, or of a row in the
// whole block.
static const u32 MOST_HELD = 2 * STREAM_HELD;

// A group of warps makes the operand of a row in shared memory from x, to the bit as `rms_norm` and `make_operand` do.
// Returns the row's factor.
DEVICE float group_operand(const Linear& p, u32 row, float4 (&all_held)[MOST_HELD], u8* to) {
    __shared__ float parts[4][32], maxima[4][8];
    const float4* x = (const float4*)(p.x_plain + (u64)row * p.cols);
    const float4* weights = (const float4*)p.norm_weight;
    float4* held = all_held;
    const float4* weight = all_held + STREAM_HELD;
    u32 group = threadIdx.x / GROUP_THREADS, me = threadIdx.x % GROUP_THREADS;
    u32 vectors = p.cols / 4, rest = me + STREAM_HELD * GROUP_THREADS;
    float factor = 1.0f;
    if (weights) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (u32 k = 0; k < STREAM_HELD; k++) add_squares(sum, held[k]);
#pragma unroll 1
        for (u32 i = rest; i < vectors; i += GROUP_THREADS) add_squares(sum, x[i]);
        float part = norm_part(sum);
        if (me % 8 == 0) parts[group][me / 8] = part;
        wait_among(1 + group, GROUP_THREADS);
        factor = norm_factor(parts[group], p.cols, p.eps);
#pragma unroll
        for (u32 k = 0; k < STREAM_HELD; k++) held[k] = normed(held[k], factor, weight[k]);
    }
    auto value = [&](u32 i) { return weights ? normed(x[i], factor, weights[i]) : x[i]; };
    float largest = 0.0f;
#pragma unroll
    for (u32 k = 0; k < STREAM_HELD; k++) largest = largest_of(largest, held[k]);
#pragma unroll 1
    for (u32 i = rest; i < vectors; i += GROUP_THREADS) largest = largest_of(largest, value(i));
    largest = warp_max(largest);
    if (me % 32 == 0) maxima[group][me / 32] = largest;
    wait_among(1 + group, GROUP_THREADS);
    largest = maxima[group][me % 8];
#pragma unroll
    for (int distance = 4; distance > 0; distance /= 2) largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest,
        distance));
    u32 forward = forward_exponent(largest);
    float by = power(forward);
    u8* place = to + pair_place(4 * me);
    float4* normed_row = weights && blockIdx.x == 0 ? (float4*)(p.normed + (u64)row * p.cols) : nullptr;
    auto put = [&](u32 i, u8* place, const float4& v) {
        put_at(place, half_vector(v, by));
        if (normed_row) normed_row[i] = v;
    };
#pragma unroll
    for (u32 k = 0; k < STREAM_HELD; k++)
        if (me + k * GROUP_THREADS < vectors) put(me + k * GROUP_THREADS, place + vectors_apart(k * GROUP_THREADS),
            held[k]);
#pragma unroll 1
    for (u32 i = rest; i < vectors; i += GROUP_THREADS) put(i, to + pair_place(4 * i), value(i));
#pragma unroll 1
    for (u32 i = vectors + me; i < p.x.pitch / 4; i += GROUP_THREADS) put_vector(to, i, make_uint2(0, 0));
    return power(254 - forward);
}

// The whole block makes the operand of a row whose largest magnitude is known. Returns the row's factor.
DEVICE float plain_operand(const Linear& p, u32 row, float largest, const float4 (&held)[MOST_HELD], u8* to) {
    const float4* x = (const float4*)(p.x_plain + (u64)row * p.cols);
    u32 forward = forward_exponent(largest);
    float by = power(forward);
    u8* place = to + pair_place(4 * threadIdx.x);
#pragma unroll
    for (u32 k = 0; k < PLAIN_HELD; k++)
        if (threadIdx.x + k * THREADS < p.cols / 4) put_at(place + vectors_apart(k * THREADS), half_vector(held[k],
            by));
#pragma unroll 1
    for (u32 i = threadIdx.x + PLAIN_HELD * THREADS; i < p.cols / 4; i += THREADS) put_vector(to, i, half_vector(x[i],
        by));
#pragma unroll 1
    for (u32 i = p.cols / 4 + threadIdx.x; i < p.x.pitch / 4; i += THREADS) put_vector(to, i, make_uint2(0, 0));
    return power(254 - forward);
}

// Copies a row of an operand that was made before, in pieces of eight columns. Returns the row's factor.
DEVICE float copied_operand(const Linear& p, u32 row, u8* to) {
#pragma unroll 2
    for (u32 i = threadIdx.x; i < p.x.pitch / 8; i += THREADS) {
        uint4 piece = *(const uint4*)(p.x.numbers + operand_place(row, i * 8, p.x.pitch));
        put_vector(to, 2 * i, make_uint2(piece.x, piece.y));
        put_vector(to, 2 * i + 1, make_uint2(piece.z, piece.w));
    }
    return p.x.scales[row];
}

// Makes or copies the operand of all rows in shared memory, rows `row_bytes` apart. Calls `meanwhile` after the loads
// of the first row were issued, because they would wait behind its own.
template <class Meanwhile>
DEVICE void bring_operand(const Linear& p, u8* rows, u32 row_bytes, float* scales, Meanwhile meanwhile) {
    bool by_groups = p.makes_operand && (p.norm_weight || p.maxima_are != 1);
    u32 first = by_groups ? threadIdx.x / GROUP_THREADS : 0, step = by_groups ? THREADS / GROUP_THREADS : 1;
#pragma unroll 1
    for (u32 row = first; row == first || row < p.num_rows; row += step) {
        const float4* x = (const float4*)(p.x_plain + (u64)row * p.cols);
        u32 vectors = p.cols / 4;
        float4 held[MOST_HELD];
        float largest = 0.0f;
        if (by_groups && row < p.num_rows) {
            hold_vectors(held, x, vectors);
            if (p.norm_weight) hold_vectors(held + STREAM_HELD, (const float4*)p.norm_weight, vectors);
        } else if (p.makes_operand && row < p.num_rows) {
            largest = __uint_as_float(p.maxima[row]);
#pragma unroll
            for (u32 k = 0; k < PLAIN_HELD; k++)
                if (threadIdx.x + k * THREADS < vectors) held[k] = x[threadIdx.x + k * THREADS];
        }
        if (row == first) meanwhile();
        if (row >= p.num_rows) break;
        u8* to = rows + row * row_bytes;
        float scale = by_groups ? group_operand(p, row, held, to) : p.makes_operand ? plain_operand(p, row, largest,
            held, to) : copied_operand(p, row, to);
        if (threadIdx.x % GROUP_THREADS == 0) scales[row] = scale;
    }
}

// Loads 16 bytes of a row of x from shared memory. Without such a row they are undefined: they go into a column of the
// result that is never read.
DEVICE uint4 load_if(u32 from, bool is_there) {
    uint4 v;
    asm("" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w));
    if (is_there) asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z),
        "=r"(v.w) : "r"(from));
    return v;
}

// Copies 16 bytes of weights into shared memory. Weights are read once, in whole lines, and evicted first from the L2
// cache, which code and tables need more.
DEVICE void copy_streaming(u32 to, const void* from) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
        "l"(policy) : "memory");
}

// A ring of S chunks of a format.
template <int F, u32 S>
struct ChunkRing {
    static const int FORMAT = F;
    static const u32 STAGES = S;
    static const u32 BYTES = S * Weights<F>::CHUNK_BYTES;
};

// Calls `use` with the ring of a format, of which a kernel has one or several. Code that does not depend on the format
// exists once, because code has to be loaded from memory too.
template <class First, class Use>
DEVICE void with_ring(u32 format, Use use) {
    use(First());
}

template <class First, class Second, class... Rest, class Use>
DEVICE void with_ring(u32 format, Use use) {
    if (format == First::FORMAT)
        use(First());
    else
        with_ring<Second, Rest...>(format, use);
}

template <class... Rings>
DEVICE void stream(const Linear& p) {
    extern __shared__ uint4 dynamic[];
    __shared__ float scales[8];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    // The last blocks may have tiles of a second format.
    bool is_second = blockIdx.x >= p.plan.first_blocks;
    u32 format = is_second ? p.plan.second_format : p.plan.format;
    u32 block = is_second ? blockIdx.x - p.plan.first_blocks : blockIdx.x,
        num_blocks = is_second ? gridDim.x - p.plan.first_blocks : p.plan.first_blocks;
    u32 begin_tile = is_second ? p.plan.second_tile : 0,
        num_items = (is_second ? p.num_tiles - p.plan.second_tile : p.plan.second_tile) / 2;
    u32 ring_bytes;
    with_ring<Rings...>(format, [&](auto ring) { ring_bytes = ring.BYTES; });
    // Rows of x have a pitch of 16 bytes more than a multiple of 128, so that eight rows lie in different banks.
    u32 row_bytes = p.x.pitch * 2 + 16;
    u8* my_ring = (u8*)dynamic + warp * ring_bytes;
    u8* operand = (u8*)dynamic + WARPS * ring_bytes;

    // The warps of an item are a team.
    u32 spread_log = logarithm(p.plan.spread), team_warps = 2 << spread_log, team = warp >> (spread_log + 1),
        member = warp % team_warps;
    u32 my_tile = member >> spread_log, my_slices = p.slices >> spread_log,
        first_slice = member % p.plan.spread * my_slices;
    u32 begin_group = slice_start(p.cols, p.slices, first_slice), end_group = slice_start(p.cols, p.slices,
        first_slice + my_slices);
    u32 first = team * num_blocks + block, stride = (WARPS >> (spread_log + 1)) * num_blocks;
    auto tile_of = [&](u32 item, u32 which) { return p.is_gated ?
        item + which * num_items : begin_tile + 2 * item + which; };
    // The sums of a team, [2][tile][slice][row][output]: two buffers, so that one barrier a round is enough. No warp is
    // two rounds ahead.
    u32 of_slice = p.num_rows * 16, of_tile = p.slices * of_slice;
    float* partial = (float*)(operand + p.num_rows * row_bytes) + team * 4 * of_tile;

    u32 next_item = first, left = 0, into = 0;
    u32 ring_address = shared_address(my_ring) + lane * 16;
    const u8* source;
    auto bring = [&](auto ring) {
        typedef Weights<ring.FORMAT> W;
        if (next_item < num_items) {
            if (left == 0) {
                u32 tile = tile_of(next_item, my_tile);
                const LinearPart& part = part_of(p, tile);
                source = group_weights<W>(part.weight, tile - part.first_tile, begin_group, p.cols) + lane * 16;
                left = (end_group - begin_group) * (4 / W::CHUNK_UNITS);
            }
            if (--left == 0) next_item += stride;
            u32 to = ring_address + into;
#pragma unroll
            for (u32 i = 0; i < W::CHUNK_BYTES / 512; i++) copy_streaming(to + i * 512, source + i * 512);
            const u32 rest = W::CHUNK_BYTES % 512, whole = W::CHUNK_BYTES - rest;
            if (rest && lane < rest / 16) copy_streaming(to + whole, source + whole);
            source += SIDE * W::CHUNK_BYTES;
            into = into == ring.BYTES - W::CHUNK_BYTES ? 0 : into + W::CHUNK_BYTES;
        }
        copy_async_commit();
    };
    auto bring_chunks = [&](u32 from, u32 to) {
        with_ring<Rings...>(format, [&](auto ring) {
#pragma unroll 1
            for (u32 i = from; i < min(to, ring.STAGES - 1); i++) bring(ring);
        });
    };
    let_next_start();
    // These chunks arrive before x: enough to begin with, and more if the rings would run dry.
    bring_chunks(0, p.plan.early);
    if (p.norm_weight) prefetch(p.norm_weight, p.cols);

    wait_for_previous();
    bring_operand(p, operand, row_bytes, scales, [&]() {
        // No warp loads more chunks before the warps that make the operand have issued their loads of x.
        if (p.num_rows == 1) __syncthreads();
        bring_chunks(p.plan.early, ~0u);
    });
    if (p.maxima_are == 3 && blockIdx.x == 0 && threadIdx.x < p.num_rows) p.maxima[threadIdx.x] = 0;
    __syncthreads();

    // Adds up the slices of an item and writes the results: a warp for each row, a lane for each output.
    auto finish = [&](u32 item, u32 round, float before) {
        for (u32 row = (member + round) % team_warps; row < p.num_rows; row += team_warps) {
            u32 which = lane / 16, tile = tile_of(item, which);
            const LinearPart& part = part_of(p, tile);
            u32 output = (tile - part.first_tile) * 16 + lane % 16;
            bool inside = output < part.outputs;
            u64 place = (u64)row * part.outputs + output;
            if (p.residual && inside && row >= team_warps) before = p.residual[place];
            const float* sums = partial + (round % 2 * 2 + which) * of_tile + row * 16 + lane % 16;
            float of_slices[MAX_SLICES];
#pragma unroll
            for (u32 s = 0; s < MAX_SLICES; s++)
                if (s < p.slices) of_slices[s] = sums[s * of_slice];
            float result = of_slices[0];
#pragma unroll
            for (u32 s = 1; s < MAX_SLICES; s++)
                if (s < p.slices) result = __fadd_rn(result, of_slices[s]);
            result = finished(result, scales[row], inside ? part.bias : nullptr, output);
            if (p.is_gated) {
                float up = __shfl_down_sync(FULL_WARP, result, 16);
                float product = which == 0 && inside ? gated(p.activation, result, up) : 0.0f;
                if (which == 0) result = product;
                if (p.maxima_are == 2) {
                    float largest = warp_max(magnitude(product));
                    // Magnitudes are not negative, so their bits compare as the values do.
                    if (lane == 0) atomicMax(p.maxima + row, __float_as_uint(largest));
                }
            }
            if (!inside) continue;
            part.out[place] = result;
            if (p.residual) p.residual[place] = __fadd_rn(before, result);
        }
    };

    bool has_row = g < p.num_rows;
    u32 my_row = shared_address(operand) + g * row_bytes + begin_group * 512 + t * 32;
    u32 from = 0;
    // A warp's slices of a tile.
    auto sum_slices = [&](auto ring, u32 round) {
        typedef Weights<ring.FORMAT> W;
        u32 at = my_row, group = begin_group;
        for (u32 slice = 0; slice < my_slices; slice++) {
            float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            u32 slice_end = slice_start(p.cols, p.slices, first_slice + slice + 1);
            u32 chunks = (slice_end - group) * (4 / W::CHUNK_UNITS);
            group = slice_end;
            for (; chunks > 0; chunks--) {
                copy_async_wait<ring.STAGES - 2>();
                __syncwarp();
                bring(ring);
#pragma unroll
                for (int unit = 0; unit < W::CHUNK_UNITS; unit++) {
                    typename W::Raw raw;
                    W::template load<FromShared>(raw, my_ring + from, unit, lane);
                    uint4 x[2] = {load_if(at, has_row), load_if(at + 16, has_row)};
                    at += 128;
#pragma unroll
                    for (int s = 0; s < 4; s++) {
                        u32 a[4];
                        W::decode(a, raw, s);
                        const uint4& pairs = x[s / 2];
                        multiply<ring.FORMAT>(sum, a, s % 2 ? pairs.z : pairs.x, s % 2 ? pairs.w : pairs.y);
                    }
                }
                from = from == ring.BYTES - W::CHUNK_BYTES ? 0 : from + W::CHUNK_BYTES;
            }
            float* mine = partial + (round % 2 * 2 + my_tile) * of_tile + (first_slice + slice) * of_slice;
#pragma unroll
            for (u32 j = 0; j < 4; j++)
                if (2 * t + j % 2 < p.num_rows) mine[(2 * t + j % 2) * 16 + g + j / 2 * 8] = grown<W>(sum[j]);
        }
    };
    u32 round = 0;
    for (u32 item = first; item < num_items; item += stride, round++) {
        // Prefetch the residual of the first row that this warp writes.
        float before = 0.0f;
        u32 first_row = (member + round) % team_warps;
        if (p.residual && first_row < p.num_rows) {
            u32 output = 32 * item + lane;
            if (output < p.parts[0].outputs) before = p.residual[(u64)first_row * p.parts[0].outputs + output];
        }
        with_ring<Rings...>(format, [&](auto ring) { sum_slices(ring, round); });
        wait_among(1 + team, 32 * team_warps);
        finish(item, round, before);
    }
}

#else

// Other GPUs use `linear_few`.
template <int F, u32 S>
struct ChunkRing {};

template <class... Rings>
DEVICE void stream(const Linear& p) {}

#endif

// One kernel with the deepest rings that fit beside one or two rows, and one with shallow rings for more. Two K formats
// that a model mixes share a kernel; with all three in one it was 1 % slower.
#define STREAM(NAME, ...) \
    KERNEL void __launch_bounds__(512, 1) NAME(Linear p) { stream<__VA_ARGS__>(p); }

STREAM(stream_q8_0, ChunkRing<Q8_0, 5>)
STREAM(stream_rows_q8_0, ChunkRing<Q8_0, 3>)
STREAM(stream_q4_0, ChunkRing<Q4_0, 5>)
STREAM(stream_rows_q4_0, ChunkRing<Q4_0, 3>)
STREAM(stream_q4_k, ChunkRing<Q4_K, 4>, ChunkRing<Q6_K, 3>)
STREAM(stream_rows_q4_k, ChunkRing<Q4_K, 3>, ChunkRing<Q6_K, 3>)
STREAM(stream_q5_k, ChunkRing<Q5_K, 4>, ChunkRing<Q6_K, 3>)
STREAM(stream_rows_q5_k, ChunkRing<Q5_K, 3>, ChunkRing<Q6_K, 3>)
