// Softmax attention over the keys and values of blocks: of chunks of tokens (prefill), and of single tokens where
// decode.cu does not serve.
//
// out = sum over visible j of softmax_j(cap(scale * q.k_j)) v_j; queries and out are [rows][heads * head_size]. Keys
// are taken in tiles whose edges are multiples of the tile's length. A tile gives its largest score, the sum of
// exp(score - largest) and the weighted sum of values; tiles are merged one after the other in ascending order. One
// block may do all tiles of a row, or tiles are distributed over blocks and merge_tiles.cu merges them: the arithmetic
// is the same, and depends on the row's position alone.
//
// Two definitions: a plain one in f32 for any format and head, with tiles of 128, and one on the tensor cores, with
// tiles of 64, for keys and values of 16 bits, and of 8 bits that are converted to f16 before they are multiplied. The
// choice depends on format, head and block length alone. The kernels of the second, here, in decode.cu for one token,
// and in prefill_wgmma.cu for a chunk on compute capability 9.0, give the same bits.
//
// Bytes moved for one row: every visible key and value once. Bound: the tensor cores, for a chunk; memory bandwidth,
// for one token.

static const int TILE = 128;

template <int S>
DEVICE void load_four(float (&v)[4], const void* from, u64 i, u64 num_stored) {
    if (S == STORE_Q8) {
        u32 bytes = *(const u32*)((const u8*)from + i);
        float scale = half_to_float(q8_scale(from, num_stored, i));
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = __fmul_rn((float)(signed char)(bytes >> 8 * j), scale);
    } else if (S == STORE_F32) {
        float4 f = *(const float4*)((const float*)from + i);
        v[0] = f.x; v[1] = f.y; v[2] = f.z; v[3] = f.w;
    } else {
        uint2 bits = *(const uint2*)((const u16*)from + i);
        u16 h[4] = {(u16)bits.x, (u16)(bits.x >> 16), (u16)bits.y, (u16)(bits.y >> 16)};
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = S == STORE_F16 ? half_to_float(h[j]) : bf16_to_float(h[j]);
    }
}

template <int S>
DEVICE float load_one(const void* from, u64 i, u64 num_stored) {
    if (S == STORE_Q8)
        return __fmul_rn((float)((const signed char*)from)[i], half_to_float(q8_scale(from, num_stored, i)));
    if (S == STORE_F32) return ((const float*)from)[i];
    u16 bits = ((const u16*)from)[i];
    return S == STORE_F16 ? half_to_float(bits) : bf16_to_float(bits);
}

// 128 threads for one row and up to G query heads that share a kv head. Thread j scores key j of the tile, then sums
// dimensions j, j + 128, ... of the values, DIMS of them, from dimension `first_value` of a stored value on: a head of
// the output has `value_size`. blockIdx: x = row, y = kv head and piece of its group, z = tile when each tile has a
// block.
template <int S, int G, int DIMS>
DEVICE void attend(const Attention& a, u32 first_value, u32 value_size) {
    extern __shared__ float shared[];
    __shared__ float maxima[G][4], sums[G][4];
    begin();
    u32 row = blockIdx.x, j = threadIdx.x, hs = a.head_size;
    u32 group = a.num_heads / a.num_kv_heads;
    u32 pieces = (group + G - 1) / G;
    u32 kv_head = blockIdx.y / pieces, first_head = kv_head * group + blockIdx.y % pieces * G;
    u32 heads = min((u32)G, (kv_head + 1) * group - first_head);
    u32 position = a.positions[row];
    u32 first = a.window && position + 1 > a.window ? position + 1 - a.window : 0;
    bool split = a.partial != 0;
    u32 begin_tile = split ? blockIdx.z : first / TILE;
    u32 end_tile = split ? blockIdx.z + 1 : position / TILE + 1;
    if (split && (blockIdx.z < first / TILE || blockIdx.z > position / TILE)) return;

    // Queries are padded with zeros to a multiple of four values.
    u32 hs4 = (hs + 3) / 4 * 4;
    float* queries = shared;            // [G][hs4]
    float* weights = shared + G * hs4;  // [G][TILE]
    for (u32 i = j; i < G * hs4; i += TILE) {
        u32 h = i / hs4, d = i % hs4;
        queries[i] = h < heads && d < hs ? a.queries[((u64)row * a.num_heads + first_head + h) * hs + d] : 0.0f;
    }
    const u32* table = a.block_tables + a.first_blocks[row];
    const float nothing = __int_as_float(0xff800000);
    float values[G][DIMS];
    Running running[G];
#pragma unroll
    for (int h = 0; h < G; h++) {
#pragma unroll
        for (int i = 0; i < DIMS; i++) values[h][i] = 0.0f;
        running[h].largest = nothing;
        running[h].sum = 0.0f;
    }
    __syncthreads();
    for (u32 tile = begin_tile; tile < end_tile; tile++) {
        u32 key = tile * TILE + j;
        bool visible = key >= first && key <= position;
        float score[G];
#pragma unroll
        for (int h = 0; h < G; h++) score[h] = 0.0f;
        if (visible) {
            u64 at = (((u64)table[key / a.block_len] * a.num_kv_heads +
                kv_head) * a.block_len + key % a.block_len) * hs;
            for (u32 d = 0; d < hs4; d += 4) {
                float k[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                if (hs == hs4)
                    load_four<S>(k, a.key_blocks, at + d, a.num_stored);
                else
                    for (u32 i = 0; i < 4 && d + i < hs; i++) k[i] = load_one<S>(a.key_blocks, at + d + i,
                        a.num_stored);
#pragma unroll
                for (int h = 0; h < G; h++)
#pragma unroll
                    for (int i = 0; i < 4; i++) score[h] = __fmaf_rn(queries[h * hs4 + d + i], k[i], score[h]);
            }
        }
#pragma unroll
        for (int h = 0; h < G; h++) {
            score[h] = __fmul_rn(score[h], a.scale);
            if (a.cap != 0.0f) score[h] = __fmul_rn(a.cap, tanhf(__fdiv_rn(score[h], a.cap)));
            if (!visible) score[h] = nothing;
            float largest = warp_max(score[h]);
            if (j % 32 == 0) maxima[h][j / 32] = largest;
        }
        __syncthreads();
        Running here[G];
#pragma unroll
        for (int h = 0; h < G; h++) {
            here[h].largest = fmaxf(fmaxf(maxima[h][0], maxima[h][1]), fmaxf(maxima[h][2], maxima[h][3]));
            float weight = visible ? expf(__fsub_rn(score[h], here[h].largest)) : 0.0f;
            weights[h * TILE + j] = weight;
            float sum = warp_sum(weight);
            if (j % 32 == 0) sums[h][j / 32] = sum;
        }
        __syncthreads();
        u32 from = max(first, tile * TILE), to = min(position + 1, (tile + 1) * TILE);
        float tile_values[G][DIMS];
#pragma unroll
        for (int h = 0; h < G; h++)
#pragma unroll
            for (int i = 0; i < DIMS; i++) tile_values[h][i] = 0.0f;
        for (u32 key = from; key < to; key++) {
            u64 at = (((u64)table[key / a.block_len] * a.num_kv_heads +
                kv_head) * a.block_len + key % a.block_len) * hs + first_value;
            float v[DIMS];
#pragma unroll
            for (int i = 0; i < DIMS; i++)
                v[i] = j + i * TILE < value_size ? load_one<S>(a.value_blocks, at + j + i * TILE, a.num_stored) : 0.0f;
#pragma unroll
            for (int h = 0; h < G; h++) {
                float weight = weights[h * TILE + key % TILE];
#pragma unroll
                for (int i = 0; i < DIMS; i++) tile_values[h][i] = __fmaf_rn(weight, v[i], tile_values[h][i]);
            }
        }
#pragma unroll
        for (int h = 0; h < G; h++) {
            here[h].sum = __fadd_rn(__fadd_rn(sums[h][0], sums[h][1]), __fadd_rn(sums[h][2], sums[h][3]));
            float keep, add;
            merge<false>(running[h], here[h], keep, add);
#pragma unroll
            for (int i = 0; i < DIMS; i++)
                values[h][i] = joined(values[h][i], keep, tile_values[h][i], add);
        }
        __syncthreads();
    }
#pragma unroll
    for (int h = 0; h < G; h++) {
        if (h >= heads) continue;
        u64 head = (u64)row * a.num_heads + first_head + h;
        float* to = split ? a.partial + (head * a.max_tiles + blockIdx.z) * (value_size + TILE_EXTRA)
                          : a.out + head * value_size;
        float sum = running[h].sum;
        if (!split) sum = __fadd_rn(sum, sink_weight<false>(a, first_head + h, running[h].largest));
#pragma unroll
        for (int i = 0; i < DIMS; i++)
            if (j + i * TILE < value_size) to[j + i * TILE] = split ? values[h][i] : __fdiv_rn(values[h][i], sum);
        if (split && j == 0) {
            to[value_size] = running[h].largest;
            to[value_size + 1] = running[h].sum;
        }
    }
}

// On the tensor cores. A warp has 16 rows of scores: the query heads that share a kv head, of all tokens that fit.
// Queries and weights are rounded to the format of keys and values; scores, sums and merging are f32.
//
// SPLIT: a block is one token, and each of its warps takes a tile of keys; without, four warps take consecutive tokens
// of one sequence and go through its tiles together. blockIdx: x = row, y = kv head and piece of its group, z = a tile
// for each warp when SPLIT.
template <int S, int HS, bool SPLIT>
DEVICE void flash(const Attention& a) {
    static const u32 ROW_BYTES = HS * 2 + 16;  // no multiple of 128, so that eight rows lie in different banks
    static const u32 TILE_BYTES = FLASH_TILE * ROW_BYTES;
    // With large heads shared memory holds one tile at a time, and queries do not fit into registers.
    static const bool IS_LARGE = HS > 128;
    extern __shared__ uint4 shared_tiles[];
    begin();
    u32 row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 group = a.num_heads / a.num_kv_heads;
    u32 padded = padded_group(group);
    u32 pieces = (group + padded - 1) / padded;
    u32 kv_head = blockIdx.y / pieces, first_head = kv_head * group + blockIdx.y % pieces * padded;
    u32 heads = min(padded, (kv_head + 1) * group - first_head);
    u32 warp_tokens = 16 / padded, block_tokens = SPLIT ? 1 : 4 * warp_tokens;
    if (!SPLIT && (row - a.first_rows[row]) % block_tokens != 0) return;
    u32 num_tokens = SPLIT ? 1 : min(block_tokens, a.end_rows[row] - row);

    // The two rows of scores that this lane has a part of.
    u64 query[2];
    int position[2], first[2];
    bool valid[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 m = g + 8 * i, token = (SPLIT ? 0 : warp * warp_tokens) + m / padded, head = m % padded;
        valid[i] = token < num_tokens && head < heads && (!SPLIT || m < padded);
        query[i] = ((u64)(row + token) * a.num_heads + first_head + head) * HS;
        position[i] = valid[i] ? (int)a.positions[row + token] : -1;
        first[i] = valid[i] && a.window ? max(0, position[i] + 1 - (int)a.window) : 0;
    }
    u32 first_position = a.positions[row], last_position = a.positions[row + num_tokens - 1];
    u32 lowest = a.window && first_position + 1 > a.window ? first_position + 1 - a.window : 0;
    u32 begin_tile = lowest / FLASH_TILE, end_tile = last_position / FLASH_TILE + 1;
    if (SPLIT) {
        u32 tile = blockIdx.z * (blockDim.x / 32) + warp;
        if (tile < begin_tile || tile >= end_tile) return;
        begin_tile = tile;
        end_tile = tile + 1;
    }

    u32 q[IS_LARGE ? 1 : HS / 16][4];
    u32 base = shared_address(shared_tiles) + (SPLIT ? warp * 2 * TILE_BYTES : 0);
    u32 shared_queries = base + 2 * TILE_BYTES + warp * 16 * ROW_BYTES;
#pragma unroll
    for (int s = 0; s < HS / 16; s++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float* from = a.queries + query[i % 2] + s * 16 + i / 2 * 8 + 2 * t;
            float2 pair = valid[i % 2] ? *(const float2*)from : make_float2(0.0f, 0.0f);
            u32 packed = pack_pair<S>(pair.x, pair.y);
            if (IS_LARGE)
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_queries +
                    (g + i % 2 * 8) * ROW_BYTES + (s * 16 + i / 2 * 8 + 2 * t) * 2), "r"(packed) : "memory");
            else
                q[IS_LARGE ? 0 : s][i] = packed;
        }
    if (IS_LARGE) __syncwarp();

    const u32* table = a.block_tables + a.first_blocks[row];
    auto fetch = [&](u32 tile, u32 stage) {
        u32 thread = SPLIT ? lane : threadIdx.x, threads = SPLIT ? 32 : 128;
        static const u32 VECTORS = HS / 8;
        for (u32 i = thread; i < FLASH_TILE * VECTORS; i += threads) {
            u32 key = tile * FLASH_TILE + i / VECTORS, d = i % VECTORS * 8;
            // Keys that no token of the block sees are zeroed: memory may hold a NaN there, and 0 * NaN is not 0.
            bool seen = key <= last_position;
            u64 head = seen ? (u64)table[key / a.block_len] * a.num_kv_heads + kv_head : 0;
            u64 at = kv_place(head, seen ? key % a.block_len : 0, d, HS, a.block_len, a.in_panels);
            u32 to = base + stage * 2 * TILE_BYTES + i / VECTORS * ROW_BYTES + d * 2;
            copy_async(to, (const u16*)a.key_blocks + at, seen);
            copy_async(to + TILE_BYTES, (const u16*)a.value_blocks + at, seen);
        }
        copy_async_commit();
    };

    const float nothing = __int_as_float(0xff800000), factor = exponent_factor(a);
    float out[HS / 8][4];
#pragma unroll
    for (int n = 0; n < HS / 8; n++) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.0f;
    Running running[2] = {{nothing, 0.0f}, {nothing, 0.0f}};
    if (!IS_LARGE) fetch(begin_tile, 0);
    for (u32 tile = begin_tile; tile < end_tile; tile++) {
        u32 stage = SPLIT || IS_LARGE ? 0 : (tile - begin_tile) % 2;
        if (IS_LARGE)
            fetch(tile, 0);
        else if (!SPLIT && tile + 1 < end_tile)
            fetch(tile + 1, 1 - stage);
        else
            copy_async_commit();
        if (IS_LARGE)
            copy_async_wait<0>();
        else
            copy_async_wait<1>();
        if (SPLIT)
            __syncwarp();
        else
            __syncthreads();
        u32 keys = base + stage * 2 * TILE_BYTES, values = keys + TILE_BYTES;

        float score[8][4];
#pragma unroll
        for (int n = 0; n < 8; n++) {
            score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0.0f;
            u32 at = keys + (n * 8 + lane % 8) * ROW_BYTES + lane / 8 * 16;
#pragma unroll
            for (int s = 0; s < HS / 16; s += 2) {
                u32 k[4];
                // The last half of an odd number of steps lies in the padding of the row, and is not used.
                load_matrices(k, at + s * 32);
                if (IS_LARGE) {
                    u32 two[2][4], from = shared_queries + lane % 16 * ROW_BYTES + s * 32 + lane / 16 * 16;
                    load_matrices(two[0], from);
                    load_matrices(two[1], from + 32);
                    multiply_pair<S>(score[n], two[0], k[0], k[1]);
                    multiply_pair<S>(score[n], two[1], k[2], k[3]);
                    continue;
                }
                multiply_pair<S>(score[n], q[IS_LARGE ? 0 : s], k[0], k[1]);
                if (s + 1 < HS / 16) multiply_pair<S>(score[n], q[IS_LARGE ? 0 : s + 1 < HS / 16 ? s + 1 : s], k[2],
                    k[3]);
            }
        }
        Running here[2] = {{nothing, 0.0f}, {nothing, 0.0f}};
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int key = tile * FLASH_TILE + n * 8 + 2 * t + i % 2;
                score[n][i] = seen_score(a, score[n][i], key, first[i / 2], position[i / 2]);
                here[i / 2].largest = fmaxf(here[i / 2].largest, score[n][i]);
            }
        float keep[2], add[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            here[i].largest = fmaxf(here[i].largest, __shfl_xor_sync(FULL_WARP, here[i].largest, 1));
            here[i].largest = __fmul_rn(fmaxf(here[i].largest, __shfl_xor_sync(FULL_WARP, here[i].largest, 2)), factor);
        }
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) score[n][i] = weight_of(score[n][i], factor,
                exponent_offset(here[i / 2].largest));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            for (int q = 0; q < 4; q++) {
                float quarter = quarter_sum(score[2 * q][2 * i], score[2 * q][2 * i + 1], score[2 * q + 1][2 * i],
                    score[2 * q + 1][2 * i + 1]);
                here[i].sum = q == 0 ? quarter : __fadd_rn(here[i].sum, quarter);
            }
            merge<true>(running[i], here[i], keep[i], add[i]);
        }
        u32 weights[4][4];
#pragma unroll
        for (int s = 0; s < 4; s++) {
            weights[s][0] = pack_pair<S>(score[2 * s][0], score[2 * s][1]);
            weights[s][1] = pack_pair<S>(score[2 * s][2], score[2 * s][3]);
            weights[s][2] = pack_pair<S>(score[2 * s + 1][0], score[2 * s + 1][1]);
            weights[s][3] = pack_pair<S>(score[2 * s + 1][2], score[2 * s + 1][3]);
        }
#pragma unroll
        for (int n = 0; n < HS / 8; n++) {
            float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int s = 0; s < 4; s += 2) {
                u32 v[4];
                load_transposed(v, values + (s * 16 + lane) * ROW_BYTES + n * 16);
                multiply_pair<S>(sum, weights[s], v[0], v[1]);
                multiply_pair<S>(sum, weights[s + 1], v[2], v[3]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
                out[n][i] = joined(out[n][i], keep[i / 2], sum[i], add[i / 2]);
        }
        if (!SPLIT) __syncthreads();
    }

#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (!valid[i]) continue;
        float* to = SPLIT ? a.partial + (query[i] / HS * a.max_tiles +
            begin_tile) * (HS + TILE_EXTRA) : a.out + query[i];
        u32 head = first_head + (g + 8 * i) % padded;
        float sum = SPLIT ? 1.0f : __fadd_rn(running[i].sum, sink_weight<true>(a, head, running[i].largest));
#pragma unroll
        for (int n = 0; n < HS / 8; n++) {
            float low = out[n][2 * i], high = out[n][2 * i + 1];
            if (!SPLIT) {
                low = __fdiv_rn(low, sum);
                high = __fdiv_rn(high, sum);
            }
            *(float2*)(to + n * 8 + 2 * t) = make_float2(low, high);
        }
        if (SPLIT && t == 0) {
            to[HS] = running[i].largest;
            to[HS + 1] = running[i].sum;
        }
    }
}

#define FLASH(NAME, S, HS)                                                                                  \
    KERNEL void __launch_bounds__(128) flash_##NAME##_##HS(Attention a) { flash<S, HS, false>(a); }         \
    KERNEL void __launch_bounds__(128) flash_split_##NAME##_##HS(Attention a) { flash<S, HS, true>(a); }

// One token with heads of 256 is computed by decode.cu or, where panels do not fit, by the plain kernel.
KERNEL void __launch_bounds__(128) flash_f16_256(Attention a) { flash<STORE_F16, 256, false>(a); }
KERNEL void __launch_bounds__(128) flash_bf16_256(Attention a) { flash<STORE_BF16, 256, false>(a); }

FLASH(f16, STORE_F16, 64)
FLASH(f16, STORE_F16, 80)
FLASH(f16, STORE_F16, 96)
FLASH(f16, STORE_F16, 128)
FLASH(bf16, STORE_BF16, 64)
FLASH(bf16, STORE_BF16, 80)
FLASH(bf16, STORE_BF16, 96)
FLASH(bf16, STORE_BF16, 128)

struct WideAttention {
    Attention attention;
    // Dimensions of stored values that are summed. The values of latent attention are parts of its keys.
    u32 first_value, value_size;
};

// Heads of more than 256 dimensions, and values that are parts of keys.
template <int S, int G>
DEVICE void attend_wide(const WideAttention& w) {
    attend<S, G, 5>(w.attention, w.first_value, w.value_size);
}

#define ATTENTION(NAME, S)                                                                                       \
    KERNEL void __launch_bounds__(128) attention_##NAME##_1(Attention a) { attend<S, 1, 2>(a, 0, a.head_size); } \
    KERNEL void __launch_bounds__(128) attention_##NAME##_2(Attention a) { attend<S, 2, 2>(a, 0, a.head_size); } \
    KERNEL void __launch_bounds__(128) attention_##NAME##_4(Attention a) { attend<S, 4, 2>(a, 0, a.head_size); } \
    KERNEL void __launch_bounds__(128) attention_##NAME##_8(Attention a) { attend<S, 8, 2>(a, 0, a.head_size); } \
    KERNEL void __launch_bounds__(128) attention_wide_##NAME##_1(WideAttention w) { attend_wide<S, 1>(w); }      \
    KERNEL void __launch_bounds__(128) attention_wide_##NAME##_2(WideAttention w) { attend_wide<S, 2>(w); }      \
    KERNEL void __launch_bounds__(128) attention_wide_##NAME##_4(WideAttention w) { attend_wide<S, 4>(w); }      \
    KERNEL void __launch_bounds__(128) attention_wide_##NAME##_8(WideAttention w) { attend_wide<S, 8>(w); }

ATTENTION(f32, STORE_F32)
ATTENTION(f16, STORE_F16)
ATTENTION(bf16, STORE_BF16)
ATTENTION(q8, STORE_Q8)
