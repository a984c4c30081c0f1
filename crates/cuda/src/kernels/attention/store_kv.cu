// Stores keys and values, [rows][kv heads * head_size] in f32, into their blocks: as they are, rotated, or rounded to 8
// bits; and converts blocks of 8 bits to f16 for prefill. Bytes moved: each value read and written once. Bound:
// latency, with few rows; memory bandwidth.

struct StoreKv {
    const float* keys;    // [rows][kv heads * head_size]
    const float* values;  // null: keys alone are stored
    void* key_blocks;     // [block][kv head][offset][head_size], or in panels: see kv_place
    void* value_blocks;
    const u32* slots;
    u32 num_kv_heads, head_size, block_len, num_blocks;
    u32 storage, in_panels;
};

DEVICE void put_number(void* to, u32 storage, u64 i, float value) {
    if (storage == STORE_F32)
        ((float*)to)[i] = value;
    else
        ((u16*)to)[i] = kept(storage, value);
}

// A block for each row.
KERNEL void store_kv(StoreKv s) {
    begin();
    u32 row = blockIdx.x, cols = s.num_kv_heads * s.head_size;
    u32 slot = s.slots[row];
    if (slot / s.block_len >= s.num_blocks) return;
    for (u32 i = threadIdx.x; i < cols; i += blockDim.x) {
        u32 head = i / s.head_size;
        u64 at = kv_place((u64)(slot / s.block_len) * s.num_kv_heads + head, slot % s.block_len, i % s.head_size,
            s.head_size, s.block_len, s.in_panels);
        put_number(s.key_blocks, s.storage, at, s.keys[(u64)row * cols + i]);
        if (s.values) put_number(s.value_blocks, s.storage, at, s.values[(u64)row * cols + i]);
    }
}

// Stores keys and values in 8 bits: a block of whole warps for each row, a warp for each group.
KERNEL void store_q8(StoreKv s) {
    begin();
    u32 row = blockIdx.x, lane = threadIdx.x % 32, cols = s.num_kv_heads * s.head_size, groups = cols / Q8_GROUP;
    u32 slot = s.slots[row];
    if (slot / s.block_len >= s.num_blocks) return;
    for (u32 item = threadIdx.x / 32; item < (s.values ? 2 : 1) * groups; item += blockDim.x / 32) {
        u32 col = item % groups * Q8_GROUP;
        float x = (item < groups ? s.keys : s.values)[(u64)row * cols + col + lane];
        float largest = warp_max(magnitude(x));
        float d = __fdiv_rn(largest, 127.0f), inverse = d == 0.0f ? 0.0f : __fdiv_rn(1.0f, d);
        u8* blocks = (u8*)(item < groups ? s.key_blocks : s.value_blocks);
        u64 at = kv_place((u64)(slot / s.block_len) * s.num_kv_heads + col / s.head_size, slot % s.block_len,
            col % s.head_size, s.head_size, s.block_len, false);
        blocks[at + lane] = (u8)(int)roundf(__fmul_rn(x, inverse));
        // A value that f16 cannot hold becomes a NaN, which every result that depends on it shows.
        u16 scale = largest <= 65504.0f ? float_to_half(d) : (u16)0x7fff;
        u64 num_stored = (u64)s.num_blocks * s.block_len * cols;
        if (lane == 0) ((u16*)(blocks + num_stored))[at / Q8_GROUP] = scale;
    }
}

struct ExpandKv {
    const u8* key_blocks;
    const u8* value_blocks;
    const u32* block_tables;
    // Panels of f16: block i is entry i of the tables or, without `own_tables`, the block with the same number.
    u16* keys;
    u16* values;
    u32* own_tables; // entry i is i; or null
    u64 num_stored;
    u32 num_kv_heads, head_size, block_len;
};

// Writes the blocks of a step from 8 bits to f16 in panels. blockIdx: x = entry of the block tables, y = kv head, z =
// keys or values.
KERNEL void expand_q8(ExpandKv e) {
    begin();
    const u8* from = blockIdx.z ? e.value_blocks : e.key_blocks;
    u16* to = blockIdx.z ? e.values : e.keys;
    u32 block = e.block_tables[blockIdx.x];
    u64 source = (u64)block * e.num_kv_heads + blockIdx.y,
        target = (u64)(e.own_tables ? blockIdx.x : block) * e.num_kv_heads + blockIdx.y;
    u32 pieces = e.head_size / 8;
    for (u32 i = threadIdx.x; i < e.block_len * pieces; i += blockDim.x) {
        u32 offset = i / pieces, d = i % pieces * 8;
        u64 at = kv_place(source, offset, d, e.head_size, e.block_len, false);
        uint4 halves = q8_to_halves(*(const uint2*)(from + at), q8_scale(from, e.num_stored, at));
        *(uint4*)(to + kv_place(target, offset, d, e.head_size, e.block_len, true)) = halves;
    }
    if (e.own_tables && threadIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0) e.own_tables[blockIdx.x] = blockIdx.x;
}

struct RotateAndStore {
    StoreKv store;         // its keys are rotated in place
    float* queries;        // [rows][heads * head_size], rotated in place
    const float* angles;   // [rows][cos of every pair, then sin]
    u32 num_rows, num_heads, pairs;
    u32 interleaved;
};

// Rotates queries and keys, and stores keys and values: a thread for each pair of a head, and for each value outside
// the pairs.
KERNEL void rotate_and_store(RotateAndStore s) {
    begin();
    u32 hs = s.store.head_size, singles = hs - 2 * s.pairs;
    u32 turned_items = s.pairs + singles, kv_heads = s.store.num_kv_heads;
    u32 per_row = (s.num_heads + kv_heads) * turned_items + (s.store.values ? kv_heads * hs : 0);
    u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    u32 row = index / per_row, item = index % per_row;
    if (row >= s.num_rows) return;
    u32 slot = s.store.slots[row], block = slot / s.store.block_len;
    auto place = [&](u32 head, u32 d) {
        return kv_place((u64)block * kv_heads + head, slot % s.store.block_len, d, hs, s.store.block_len,
            s.store.in_panels);
    };
    bool stores = block < s.store.num_blocks;
    if (item >= (s.num_heads + kv_heads) * turned_items) {
        u32 i = item - (s.num_heads + kv_heads) * turned_items;
        if (stores)
            put_number(s.store.value_blocks, s.store.storage, place(i / hs, i % hs),
                s.store.values[(u64)row * kv_heads * hs + i]);
        return;
    }
    u32 head = item / turned_items, pair = item % turned_items;
    bool is_key = head >= s.num_heads;
    if (is_key) head -= s.num_heads;
    float* x = is_key ? (float*)s.store.keys +
        ((u64)row * kv_heads + head) * hs : s.queries + ((u64)row * s.num_heads + head) * hs;
    if (pair >= s.pairs) {
        u32 d = pair + s.pairs;
        if (is_key && stores) put_number(s.store.key_blocks, s.store.storage, place(head, d), x[d]);
        return;
    }
    const float* angles = s.angles + (u64)row * 2 * s.pairs;
    u32 first = s.interleaved ? 2 * pair : pair, second = s.interleaved ? 2 * pair + 1 : pair + s.pairs;
    float a = x[first], b = x[second];
    rotate(a, b, angles[pair], angles[s.pairs + pair]);
    x[first] = a;
    x[second] = b;
    if (is_key && stores) {
        put_number(s.store.key_blocks, s.store.storage, place(head, first), a);
        put_number(s.store.key_blocks, s.store.storage, place(head, second), b);
    }
}
