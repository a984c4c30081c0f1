// Writing keys and values into their blocks, and softmax attention over them.
//
// out = sum over visible j of softmax_j(cap(scale * q.k_j)) v_j. Keys are taken in tiles of 128 positions whose edges are multiples of
// 128. A tile gives its largest score, the sum of exp(score - largest) and the weighted sum of values; tiles are merged one after the
// other in ascending order. One block may do all tiles of a row, or each tile a block of its own and `attention_merge` the rest: the
// arithmetic is the same, and depends on the row's position alone.
//
// Bytes moved for one row: every visible key and value once. For many rows of one sequence this plain kernel reads them again for each row,
// from the second cache.

enum Storage { STORE_F32 = 0, STORE_F16 = 1, STORE_BF16 = 2 };

struct StoreKv {
    const float* keys;    // [rows][kv heads * head_size]
    const float* values;
    void* key_blocks;     // [block][kv head][offset][head_size]
    void* value_blocks;
    const u32* slots;
    u32 num_kv_heads, head_size, block_len, num_blocks;
    u32 storage;
};

DEVICE void put_number(void* to, u32 storage, u64 i, float value) {
    if (storage == STORE_F32)
        ((float*)to)[i] = value;
    else
        ((u16*)to)[i] = storage == STORE_F16 ? float_to_half(value) : float_to_bf16(value);
}

// A block for each row.
KERNEL void store_kv(StoreKv s) {
    begin();
    u32 row = blockIdx.x, cols = s.num_kv_heads * s.head_size;
    u32 slot = s.slots[row];
    if (slot / s.block_len >= s.num_blocks) return;
    for (u32 i = threadIdx.x; i < cols; i += blockDim.x) {
        u32 head = i / s.head_size;
        u64 at = (((u64)(slot / s.block_len) * s.num_kv_heads + head) * s.block_len + slot % s.block_len) * s.head_size + i % s.head_size;
        put_number(s.key_blocks, s.storage, at, s.keys[(u64)row * cols + i]);
        put_number(s.value_blocks, s.storage, at, s.values[(u64)row * cols + i]);
    }
}

struct TurnAndStore {
    StoreKv store;         // its keys are turned in place
    float* queries;        // [rows][heads * head_size], turned in place
    const float* angles;   // [rows][cos of every pair, then sin]
    u32 num_rows, num_heads, pairs;
    u32 interleaved;
};

// Turns queries and keys, and stores keys and values: a thread for each pair of a head, and for each number that no pair holds.
KERNEL void turn_and_store(TurnAndStore s) {
    begin();
    u32 hs = s.store.head_size, singles = hs - 2 * s.pairs;
    u32 turned_items = s.pairs + singles, kv_heads = s.store.num_kv_heads;
    u32 per_row = (s.num_heads + kv_heads) * turned_items + kv_heads * hs;
    u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    u32 row = index / per_row, item = index % per_row;
    if (row >= s.num_rows) return;
    u32 slot = s.store.slots[row], block = slot / s.store.block_len;
    auto place = [&](u32 head, u32 d) {
        return (((u64)block * kv_heads + head) * s.store.block_len + slot % s.store.block_len) * hs + d;
    };
    bool stores = block < s.store.num_blocks;
    if (item >= (s.num_heads + kv_heads) * turned_items) {
        u32 i = item - (s.num_heads + kv_heads) * turned_items;
        if (stores)
            put_number(s.store.value_blocks, s.store.storage, place(i / hs, i % hs), s.store.values[(u64)row * kv_heads * hs + i]);
        return;
    }
    u32 head = item / turned_items, pair = item % turned_items;
    bool is_key = head >= s.num_heads;
    if (is_key) head -= s.num_heads;
    float* x = is_key ? (float*)s.store.keys + ((u64)row * kv_heads + head) * hs : s.queries + ((u64)row * s.num_heads + head) * hs;
    if (pair >= s.pairs) {
        u32 d = pair + s.pairs;
        if (is_key && stores) put_number(s.store.key_blocks, s.store.storage, place(head, d), x[d]);
        return;
    }
    const float* angles = s.angles + (u64)row * 2 * s.pairs;
    u32 first = s.interleaved ? 2 * pair : pair, second = s.interleaved ? 2 * pair + 1 : pair + s.pairs;
    float a = x[first], b = x[second];
    turn(a, b, angles[pair], angles[s.pairs + pair]);
    x[first] = a;
    x[second] = b;
    if (is_key && stores) {
        put_number(s.store.key_blocks, s.store.storage, place(head, first), a);
        put_number(s.store.key_blocks, s.store.storage, place(head, second), b);
    }
}

struct Attention {
    const float* queries;      // [rows][heads * head_size]
    const void* key_blocks;
    const void* value_blocks;
    float* out;
    const u32* positions;      // of each row
    const u32* first_blocks;   // of each row: where its sequence's block table starts
    const u32* block_tables;
    float* partial;            // [rows][heads][tiles][head_size + 2] when each tile has a block
    u32 num_rows, num_heads, num_kv_heads, head_size, block_len;
    u32 window;                // 0: none
    u32 max_tiles;
    float scale, cap;          // cap 0: none
};

static const int TILE = 128;

template <int S>
DEVICE void load_four(float (&v)[4], const void* from, u64 i) {
    if (S == STORE_F32) {
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
DEVICE float load_one(const void* from, u64 i) {
    if (S == STORE_F32) return ((const float*)from)[i];
    u16 bits = ((const u16*)from)[i];
    return S == STORE_F16 ? half_to_float(bits) : bf16_to_float(bits);
}

// A softmax so far. Merging with an empty one is exact.
struct Running {
    float largest, sum;
};

// How much the sums of `a` and of `b` count in their union.
DEVICE void merge(Running& a, const Running& b, float& keep, float& add) {
    float largest = fmaxf(a.largest, b.largest);
    keep = a.largest == largest ? 1.0f : expf(__fsub_rn(a.largest, largest));
    add = b.largest == largest ? 1.0f : expf(__fsub_rn(b.largest, largest));
    a.sum = __fadd_rn(__fmul_rn(a.sum, keep), __fmul_rn(b.sum, add));
    a.largest = largest;
}

// 128 threads for one row and up to G query heads that share a kv head. Thread j scores key j of the tile, then sums dimension j (and
// j + 128) of the values. blockIdx: x = row, y = kv head and piece of its group, z = tile when each tile has a block.
template <int S, int G>
DEVICE void attend(const Attention& a) {
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

    // Queries padded to whole fours with zeros, which add nothing.
    u32 hs4 = (hs + 3) / 4 * 4;
    float* queries = shared;            // [G][hs4]
    float* weights = shared + G * hs4;  // [G][TILE]
    for (u32 i = j; i < G * hs4; i += TILE) {
        u32 h = i / hs4, d = i % hs4;
        queries[i] = h < heads && d < hs ? a.queries[((u64)row * a.num_heads + first_head + h) * hs + d] : 0.0f;
    }
    const u32* table = a.block_tables + a.first_blocks[row];
    const float nothing = __int_as_float(0xff800000);
    float values[G][2];
    Running running[G];
#pragma unroll
    for (int h = 0; h < G; h++) {
        values[h][0] = values[h][1] = 0.0f;
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
            u64 at = (((u64)table[key / a.block_len] * a.num_kv_heads + kv_head) * a.block_len + key % a.block_len) * hs;
            for (u32 d = 0; d < hs4; d += 4) {
                float k[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                if (hs == hs4)
                    load_four<S>(k, a.key_blocks, at + d);
                else
                    for (u32 i = 0; i < 4 && d + i < hs; i++) k[i] = load_one<S>(a.key_blocks, at + d + i);
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
        float tile_values[G][2];
#pragma unroll
        for (int h = 0; h < G; h++) tile_values[h][0] = tile_values[h][1] = 0.0f;
        for (u32 key = from; key < to; key++) {
            u64 at = (((u64)table[key / a.block_len] * a.num_kv_heads + kv_head) * a.block_len + key % a.block_len) * hs;
            float v0 = j < hs ? load_one<S>(a.value_blocks, at + j) : 0.0f;
            float v1 = j + TILE < hs ? load_one<S>(a.value_blocks, at + j + TILE) : 0.0f;
#pragma unroll
            for (int h = 0; h < G; h++) {
                float weight = weights[h * TILE + key % TILE];
                tile_values[h][0] = __fmaf_rn(weight, v0, tile_values[h][0]);
                tile_values[h][1] = __fmaf_rn(weight, v1, tile_values[h][1]);
            }
        }
#pragma unroll
        for (int h = 0; h < G; h++) {
            here[h].sum = __fadd_rn(__fadd_rn(sums[h][0], sums[h][1]), __fadd_rn(sums[h][2], sums[h][3]));
            float keep, add;
            merge(running[h], here[h], keep, add);
#pragma unroll
            for (int i = 0; i < 2; i++)
                values[h][i] = __fadd_rn(__fmul_rn(values[h][i], keep), __fmul_rn(tile_values[h][i], add));
        }
        __syncthreads();
    }
#pragma unroll
    for (int h = 0; h < G; h++) {
        if (h >= heads) continue;
        u64 head = (u64)row * a.num_heads + first_head + h;
        float* to = split ? a.partial + (head * a.max_tiles + blockIdx.z) * (hs + 2) : a.out + head * hs;
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (j + i * TILE < hs) to[j + i * TILE] = split ? values[h][i] : __fdiv_rn(values[h][i], running[h].sum);
        if (split && j == 0) {
            to[hs] = running[h].largest;
            to[hs + 1] = running[h].sum;
        }
    }
}

// Merges the tiles of one row and head; blockIdx: x = row, y = head.
KERNEL void attention_merge(Attention a) {
    begin();
    u32 row = blockIdx.x, hs = a.head_size;
    u32 position = a.positions[row];
    u32 first = a.window && position + 1 > a.window ? position + 1 - a.window : 0;
    u64 head = (u64)row * a.num_heads + blockIdx.y;
    for (u32 d = threadIdx.x; d < hs; d += blockDim.x) {
        Running running = {__int_as_float(0xff800000), 0.0f};
        float value = 0.0f;
        for (u32 tile = first / TILE; tile <= position / TILE; tile++) {
            const float* from = a.partial + (head * a.max_tiles + tile) * (hs + 2);
            Running here = {from[hs], from[hs + 1]};
            float keep, add;
            merge(running, here, keep, add);
            value = __fadd_rn(__fmul_rn(value, keep), __fmul_rn(from[d], add));
        }
        a.out[head * hs + d] = __fdiv_rn(value, running.sum);
    }
}

#define ATTENTION(NAME, S)                                                                    \
    KERNEL void __launch_bounds__(128) attention_##NAME##_1(Attention a) { attend<S, 1>(a); } \
    KERNEL void __launch_bounds__(128) attention_##NAME##_2(Attention a) { attend<S, 2>(a); } \
    KERNEL void __launch_bounds__(128) attention_##NAME##_4(Attention a) { attend<S, 4>(a); } \
    KERNEL void __launch_bounds__(128) attention_##NAME##_8(Attention a) { attend<S, 8>(a); }

ATTENTION(f32, STORE_F32)
ATTENTION(f16, STORE_F16)
ATTENTION(bf16, STORE_BF16)
