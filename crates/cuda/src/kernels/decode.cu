// Attention of tokens that come one by one, keys and values in panels: the arithmetic of attention.cu and flash.cu to the bit.
//
// With few rows every tile of keys has a block, and the block that ends last merges them. With many rows a block takes all tiles of a
// row, one after the other. Where the step allows it, the kernel also does what comes before attention: it turns the token's query and
// key, and stores its key and value. All keys but the token's own are then older than the step, so that they are asked for before the
// kernel's turn has come.
//
// Each of four warps scores a quarter of a tile's keys, then sums a quarter of the dimensions.

struct OneToken {
    Attention a;
    // What is turned and stored here; null when that was done before.
    const float* keys;    // [rows][kv heads * head_size]
    const float* values;
    const float* angles;  // [rows][cos of every pair, then sin]
    const u32* slots;
    u32* arrived;         // for each row and blockIdx.y: tiles that are done, 0 between launches; null when `attention_merge` follows
    u32 pairs, interleaved, num_blocks;
};

// Number d of a head, turned.
DEVICE float turned(const float* x, u32 d, const float* angles, u32 pairs, bool interleaved) {
    if (d >= 2 * pairs) return x[d];
    u32 pair = interleaved ? d / 2 : d % pairs;
    float a = x[interleaved ? 2 * pair : pair], b = x[interleaved ? 2 * pair + 1 : pair + pairs];
    turn(a, b, angles[pair], angles[pairs + pair]);
    return (interleaved ? d % 2 : d / pairs) ? b : a;
}

template <int S>
DEVICE u16 rounded(float x) {
    return S == STORE_F16 ? float_to_half(x) : float_to_bf16(x);
}

DEVICE void store_shared(u32 to, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

DEVICE void store_shared(u32 to, u16 v) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(v) : "memory"); }

DEVICE float2 load_fresh(const float2* p) { return __ldcg(p); }
DEVICE float4 load_fresh(const float4* p) { return __ldcg(p); }

// Merges the tiles of some heads of a row, by 128 threads. What tiles count is computed for all of them at once, out of the largest score
// so far, which is exact; the sums follow in ascending order.
template <int HS>
DEVICE void merge_tiles(const Attention& a, u64 first_head, u32 heads, u32 begin_tile, u32 num_tiles, float* counts) {
    static const u32 PITCH = HS + TILE_EXTRA;
    const float nothing = __int_as_float(0xff800000);
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float* partial = a.partial + (first_head * a.max_tiles + begin_tile) * PITCH;
    u64 head_stride = (u64)a.max_tiles * PITCH;
    // [head][tile][keep, add, sum]
    for (u32 head = warp; head < heads; head += 4) {
        float before = nothing;
        for (u32 base = 0; base < num_tiles; base += 32) {
            u32 tile = base + lane;
            float2 of_tile = tile < num_tiles ? load_fresh((const float2*)(partial + head * head_stride + tile * (u64)PITCH + HS)) : make_float2(nothing, 0.0f);
            float so_far = of_tile.x;
            for (int i = 1; i < 32; i *= 2) {
                float other = __shfl_up_sync(FULL_WARP, so_far, i);
                if ((int)lane >= i) so_far = fmaxf(so_far, other);
            }
            float neighbour = __shfl_up_sync(FULL_WARP, so_far, 1);
            float previous = lane == 0 ? before : fmaxf(before, neighbour);
            so_far = fmaxf(so_far, before);
            if (tile < num_tiles) {
                float* count = counts + 3 * (head * num_tiles + tile);
                count[0] = share<true>(previous, so_far);
                count[1] = share<true>(of_tile.x, so_far);
                count[2] = of_tile.y;
            }
            before = __shfl_sync(FULL_WARP, so_far, 31);
        }
    }
    __syncthreads();
    for (u32 item = threadIdx.x; item < heads * (HS / 4); item += 128) {
        u32 head = item / (HS / 4), d = item % (HS / 4) * 4;
        const float* from = partial + head * head_stride + d;
        const float* count = counts + 3 * head * num_tiles;
        float sum = 0.0f;
        float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        // What is read together does not wait for each other.
        static const u32 TOGETHER = 16;
#pragma unroll 1
        for (u32 base = 0; base < num_tiles; base += TOGETHER) {
            float4 next[TOGETHER];
#pragma unroll
            for (u32 i = 0; i < TOGETHER; i++)
                if (base + i < num_tiles) next[i] = load_fresh((const float4*)(from + (base + i) * (u64)PITCH));
#pragma unroll
            for (u32 i = 0; i < TOGETHER; i++) {
                if (base + i >= num_tiles) continue;
                float keep = count[3 * (base + i)], add = count[3 * (base + i) + 1];
                sum = joined(sum, keep, count[3 * (base + i) + 2], add);
                value = make_float4(joined(value.x, keep, next[i].x, add), joined(value.y, keep, next[i].y, add),
                                    joined(value.z, keep, next[i].z, add), joined(value.w, keep, next[i].w, add));
            }
        }
        *(float4*)(a.out + (first_head + head) * HS + d) =
            make_float4(__fdiv_rn(value.x, sum), __fdiv_rn(value.y, sum), __fdiv_rn(value.z, sum), __fdiv_rn(value.w, sum));
    }
}

// blockIdx: x = row, y = kv head and piece of its group, z = tile unless the block takes ALL of them.
//
// With 8 bits, keys and values become f16 on their way into shared memory.
template <int STORED, int HS, bool ALL>
DEVICE void attend_one(const OneToken& p) {
    static const int S = STORED == STORE_Q8 ? STORE_F16 : STORED;
    static const u32 PANELS = HS / 64, PANEL_BYTES = FLASH_TILE * 128, STAGE_BYTES = PANELS * PANEL_BYTES;
    // Keys and values of a tile take turns: keys, values, keys of the next tile, ...
    static const u32 STAGES = ALL ? 3 : 2;
    static const u32 WEIGHT_PITCH = 144, QUERY_PITCH = HS * 2 + 16;
    extern __shared__ uint4 shared_panels[];
    __shared__ float maxima[4][16], sums[4][16];
    __shared__ __align__(16) u8 weights[16 * WEIGHT_PITCH];
    __shared__ __align__(16) u8 queries[16 * QUERY_PITCH];
    const Attention& a = p.a;
    bool turns = p.keys != 0;
    let_next_start();
    if (!turns) wait_for_previous();
    u32 row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 position = a.positions[row], slot = turns ? p.slots[row] : 0;
    u32 first = a.window && position + 1 > a.window ? position + 1 - a.window : 0;
    u32 begin_tile = ALL ? first / FLASH_TILE : blockIdx.z, end_tile = ALL ? position / FLASH_TILE + 1 : blockIdx.z + 1;
    if (begin_tile < first / FLASH_TILE || begin_tile > position / FLASH_TILE) return;
    u32 group = a.num_heads / a.num_kv_heads, padded = padded_group(group);
    u32 pieces = (group + padded - 1) / padded;
    u32 kv_head = blockIdx.y / pieces, first_head = kv_head * group + blockIdx.y % pieces * padded;
    u32 heads = min(padded, (kv_head + 1) * group - first_head);
    u64 first_place = (u64)row * a.num_heads + first_head;

    // A thread has half a row of a panel: 4 pieces of 16 bytes, which lie in shared memory as they do in the blocks.
    const u32* table = a.block_tables + a.first_blocks[row];
    u32 base = shared_address(shared_panels);
    auto fetch = [&](u32 tile, u32 values, u32 stage) {
        u32 r = threadIdx.x / 2, key = tile * FLASH_TILE + r;
        // The token's own come from elsewhere.
        bool seen = key <= position;
        if (tile < end_tile && !(turns && key == position)) {
            u64 head = seen ? (u64)table[key / a.block_len] * a.num_kv_heads + kv_head : 0;
            u32 offset = seen ? key % a.block_len : 0;
            const u8* blocks = (const u8*)(values ? a.value_blocks : a.key_blocks);
#pragma unroll
            for (u32 panel = 0; panel < PANELS; panel++) {
                u32 to = base + stage * STAGE_BYTES + panel * PANEL_BYTES + r * 128;
                if (STORED == STORE_Q8) {
                    // Half a row of a panel is a group.
                    u64 at = (head * a.block_len + offset) * HS + panel * 64 + threadIdx.x % 2 * 32;
                    u16 scale = q8_scale(blocks, a.num_stored, at);
                    uint4 bytes[2] = {((const uint4*)(blocks + at))[0], ((const uint4*)(blocks + at))[1]};
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        uint4 pair = bytes[i / 2];
                        uint4 halves = q8_to_halves(i % 2 ? make_uint2(pair.z, pair.w) : make_uint2(pair.x, pair.y), scale);
                        if (!seen) halves = make_uint4(0, 0, 0, 0);
                        store_shared(to + ((threadIdx.x % 2 * 4 + i) ^ r % 8) * 16, halves);
                    }
                } else {
                    const u8* from = blocks + ((head * PANELS + panel) * a.block_len + offset) * 128 + threadIdx.x % 2 * 64;
#pragma unroll
                    for (u32 i = 0; i < 4; i++) copy_async(to + threadIdx.x % 2 * 64 + i * 16, from + i * 16, seen);
                }
            }
        }
        copy_async_commit();
    };
    fetch(begin_tile, 0, 0);
    fetch(begin_tile, 1, 1);
    for (u32 i = threadIdx.x; i < (16 - heads) * QUERY_PITCH / 16; i += 128) store_shared(shared_address(queries) + heads * QUERY_PITCH + i * 16, make_uint4(0, 0, 0, 0));
    if (turns) wait_for_previous();

    // What is read together does not wait for each other: the token's key and value, and its queries.
    const float* angles = p.angles + (u64)row * 2 * p.pairs;
    bool has_own = turns && end_tile == position / FLASH_TILE + 1;
    u16 own[2][(HS + 127) / 128];
#pragma unroll
    for (u32 k = 0; k < (HS + 127) / 128; k++) {
        u64 head = ((u64)row * a.num_kv_heads + kv_head) * HS;
        u32 d = threadIdx.x + k * 128;
        if (!has_own || d >= HS) continue;
        own[0][k] = rounded<S>(turned(p.keys + head, d, angles, p.pairs, p.interleaved));
        own[1][k] = rounded<S>(p.values[head + d]);
    }
    static const u32 TOGETHER = 4;
    for (u32 base = threadIdx.x; base < heads * HS; base += TOGETHER * 128) {
        float number[TOGETHER];
#pragma unroll
        for (u32 j = 0; j < TOGETHER; j++) {
            u32 i = base + j * 128;
            const float* x = a.queries + (first_place + i / HS) * HS;
            if (i < heads * HS) number[j] = turns ? turned(x, i % HS, angles, p.pairs, p.interleaved) : x[i % HS];
        }
#pragma unroll
        for (u32 j = 0; j < TOGETHER; j++) {
            u32 i = base + j * 128;
            if (i < heads * HS) store_shared(shared_address(queries) + i / HS * QUERY_PITCH + i % HS * 2, (u16)pack_pair<S>(number[j], 0.0f));
        }
    }
    // The token's key or value: into its block, and into the stage when its tile comes.
    auto store_own = [&](u32 values, u32 stage) {
        u32 r = position % FLASH_TILE;
        u16* blocks = (u16*)(values ? a.value_blocks : a.key_blocks);
#pragma unroll
        for (u32 k = 0; k < (HS + 127) / 128; k++) {
            u32 d = threadIdx.x + k * 128;
            if (d >= HS) continue;
            store_shared(base + stage * STAGE_BYTES + d / 64 * PANEL_BYTES + r * 128 + (d / 8 % 8 ^ r % 8) * 16 + d % 8 * 2, own[values][k]);
            if (slot / a.block_len < p.num_blocks)
                blocks[kv_place((u64)(slot / a.block_len) * a.num_kv_heads + kv_head, slot % a.block_len, d, HS, a.block_len, true)] = own[values][k];
        }
    };

    const float factor = exponent_factor(a), nothing = __int_as_float(0xff800000);
    Running running[2] = {{nothing, 0.0f}, {nothing, 0.0f}};
    float out[HS / 32][4];
#pragma unroll
    for (int c = 0; c < HS / 32; c++) out[c][0] = out[c][1] = out[c][2] = out[c][3] = 0.0f;
    u32 stage = 0;  // of the keys
    auto later = [&](u32 by) { return (stage + by) % STAGES; };
    for (u32 tile = begin_tile; tile < end_tile; tile++, stage = later(2)) {
        copy_async_wait<1>();
        if (has_own && tile + 1 == end_tile) {
            store_own(0, stage);
            store_own(1, later(1));
        }
        __syncthreads();
        // Nobody reads the values of the tile before any more.
        if (ALL) fetch(tile + 1, 0, later(2));

        u32 keys = base + stage * STAGE_BYTES;
        float score[2][4];
#pragma unroll
        for (int n = 0; n < 2; n++) score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0.0f;
#pragma unroll
        for (int s = 0; s < HS / 16; s += 2) {
            u32 q[2][4], from = shared_address(queries) + lane % 16 * QUERY_PITCH + s * 32 + lane / 16 * 16;
            load_matrices(q[0], from);
            load_matrices(q[1], from + 32);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                u32 k[4], piece = 2 * s + lane / 8, r = warp * 16 + n * 8 + lane % 8;
                load_matrices(k, keys + piece / 8 * PANEL_BYTES + r * 128 + (piece % 8 ^ r % 8) * 16);
                multiply_pair<S>(score[n], q[0], k[0], k[1]);
                multiply_pair<S>(score[n], q[1], k[2], k[3]);
            }
        }
        float largest[2] = {nothing, nothing};
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int key = tile * FLASH_TILE + warp * 16 + n * 8 + 2 * t + i % 2;
                score[n][i] = seen_score(a, score[n][i], key, first, position);
                largest[i / 2] = fmaxf(largest[i / 2], score[n][i]);
            }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            largest[i] = fmaxf(largest[i], __shfl_xor_sync(FULL_WARP, largest[i], 1));
            largest[i] = fmaxf(largest[i], __shfl_xor_sync(FULL_WARP, largest[i], 2));
            if (t == 0) maxima[warp][g + 8 * i] = largest[i];
        }
        __syncthreads();
        // ... nor the keys of this one.
        if (ALL) fetch(tile + 1, 1, stage);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 m = g + 8 * i;
            largest[i] = __fmul_rn(fmaxf(fmaxf(maxima[0][m], maxima[1][m]), fmaxf(maxima[2][m], maxima[3][m])), factor);
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) score[n][i] = weight_of(score[n][i], factor, exponent_offset(largest[i / 2]));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float quarter = quarter_sum(score[0][2 * i], score[0][2 * i + 1], score[1][2 * i], score[1][2 * i + 1]);
            if (t == 0) sums[warp][g + 8 * i] = quarter;
#pragma unroll
            for (int n = 0; n < 2; n++)
                *(u32*)(weights + (g + 8 * i) * WEIGHT_PITCH + (warp * 16 + n * 8 + 2 * t) * 2) = pack_pair<S>(score[n][2 * i], score[n][2 * i + 1]);
        }
        copy_async_wait<ALL ? 2 : 0>();
        __syncthreads();

        float keep[2], add[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 m = g + 8 * i;
            Running here = {largest[i], __fadd_rn(__fadd_rn(__fadd_rn(sums[0][m], sums[1][m]), sums[2][m]), sums[3][m])};
            merge<true>(running[i], here, keep[i], add[i]);
        }
        u32 w[4][4];
#pragma unroll
        for (int s = 0; s < 4; s++)
            load_matrices(w[s], shared_address(weights) + (lane % 16) * WEIGHT_PITCH + s * 32 + lane / 16 * 16);
        u32 values = base + later(1) * STAGE_BYTES;
#pragma unroll
        for (int c = 0; c < HS / 32; c++) {
            u32 n = warp * (HS / 32) + c;
            float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int s = 0; s < 4; s += 2) {
                u32 v[4], r = s * 16 + lane;
                load_transposed(v, values + n / 8 * PANEL_BYTES + r * 128 + (n % 8 ^ r % 8) * 16);
                multiply_pair<S>(sum, w[s], v[0], v[1]);
                multiply_pair<S>(sum, w[s + 1], v[2], v[3]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) out[c][i] = ALL ? joined(out[c][i], keep[i / 2], sum[i], add[i / 2]) : sum[i];
        }
    }

#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 head = g + 8 * i;
        if (head >= heads) continue;
        float* to = ALL ? a.out + (first_place + head) * HS : a.partial + ((first_place + head) * a.max_tiles + begin_tile) * (HS + TILE_EXTRA);
#pragma unroll
        for (int c = 0; c < HS / 32; c++) {
            float low = out[c][2 * i], high = out[c][2 * i + 1];
            if (ALL) {
                low = __fdiv_rn(low, running[i].sum);
                high = __fdiv_rn(high, running[i].sum);
            }
            *(float2*)(to + (warp * (HS / 32) + c) * 8 + 2 * t) = make_float2(low, high);
        }
        if (!ALL && warp == 0 && t == 0) *(float2*)(to + HS) = make_float2(running[i].largest, running[i].sum);
    }
    if (ALL || p.arrived == 0) return;

    __shared__ bool is_last;
    u32* arrived = p.arrived + row * gridDim.y + blockIdx.y;
    u32 lowest = first / FLASH_TILE, num_tiles = position / FLASH_TILE + 1 - lowest;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(arrived, 1) == num_tiles - 1;
        if (is_last) *arrived = 0;
        __threadfence();
    }
    __syncthreads();
    if (is_last) merge_tiles<HS>(a, first_place, heads, lowest, num_tiles, (float*)shared_panels);
}

#define DECODE_TILE(NAME, S, HS) \
    KERNEL void __launch_bounds__(128) decode_tile_##NAME##_##HS(OneToken p) { attend_one<S, HS, false>(p); }
#define DECODE_ALL(NAME, S, HS) \
    KERNEL void __launch_bounds__(128) decode_all_##NAME##_##HS(OneToken p) { attend_one<S, HS, true>(p); }

DECODE_TILE(f16, STORE_F16, 64)
DECODE_TILE(f16, STORE_F16, 128)
DECODE_TILE(f16, STORE_F16, 256)
DECODE_TILE(bf16, STORE_BF16, 64)
DECODE_TILE(bf16, STORE_BF16, 128)
DECODE_TILE(bf16, STORE_BF16, 256)
DECODE_TILE(q8, STORE_Q8, 64)
DECODE_TILE(q8, STORE_Q8, 128)
DECODE_TILE(q8, STORE_Q8, 256)

DECODE_ALL(f16, STORE_F16, 64)
DECODE_ALL(f16, STORE_F16, 128)
DECODE_ALL(f16, STORE_F16, 256)
DECODE_ALL(bf16, STORE_BF16, 64)
DECODE_ALL(bf16, STORE_BF16, 128)
DECODE_ALL(bf16, STORE_BF16, 256)
