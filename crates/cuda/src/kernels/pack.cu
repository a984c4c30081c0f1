// From the bytes of a file to the device's tiles, once for each weight. A thread writes what one lane of one unit reads.

struct PackWeight {
    const u8* from;   // rows as they lie in the file, from `first_row` on
    u8* to;           // the whole packed matrix
    u64 row_bytes;
    u32 rows, cols;   // of the whole matrix
    u32 first_row;    // a multiple of 16
    u32 num_rows;     // rows in `from`
    u32 format;
    u32 from_f32;     // `from` holds f32, to be rounded to the plain format: for formats without tiles of their own
};

// The raw integer of a quantized number; `at` is the row's bytes.
DEVICE u32 raw_bits(int format, const u8* at, u32 col) {
    if (format == Q8_0) return (u8)(at[col / 32 * 34 + 2 + col % 32] + 128);
    if (format == Q4_0) {
        u32 j = col % 32;
        return at[col / 32 * 18 + 2 + j % 16] >> (j / 16 * 4) & 15;
    }
    u32 k = col % 256, s = k / 32, j = k % 32;
    if (format == Q4_K) return at[col / 256 * 144 + 16 + s / 2 * 32 + j] >> (s % 2 * 4) & 15;
    if (format == Q5_K) {
        const u8* block = at + col / 256 * 176;
        return (block[48 + s / 2 * 32 + j] >> (s % 2 * 4) & 15) | (block[16 + j] >> s & 1) << 4;
    }
    const u8* block = at + col / 256 * 210;
    u32 half = k / 128, run = k % 128 / 32;
    return (block[64 * half + 32 * (run % 2) + j] >> (run / 2 * 4) & 15) |
           (block[128 + 32 * half + j] >> (2 * run) & 3) << 4;
}

// The six-bit scale (which = 0) or minimum (which = 1) of sub-block s of a Q4_K or Q5_K block.
DEVICE u8 six_bits(const u8* block, int s, int which) {
    const u8* packed = block + 4;
    if (s < 4) return packed[s + 4 * which] & 0x3f;
    u8 low = packed[s + 4] >> (4 * which) & 0x0f;
    return low | (packed[s - 4 + 4 * which] >> 2 & 0x30);
}

DEVICE u16 two_bytes(const u8* p) { return p[0] | p[1] << 8; }

KERNEL void pack_weight(PackWeight w) {
    // Whole groups: the last is filled up with zeros.
    u32 units = (w.cols + 255) / 256 * 4;
    u64 index = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    u32 lane = index % 32;
    u32 unit = index / 32 % units;
    u64 local_tile = index / 32 / units;
    if (local_tile * 16 >= w.num_rows) return;
    u64 tile = w.first_row / 16 + local_tile;
    u32 g = lane / 4, t = lane % 4;
    u32 rows[2] = {(u32)(local_tile * 16 + g), (u32)(local_tile * 16 + g + 8)};
    bool valid[2] = {rows[0] < w.num_rows, rows[1] < w.num_rows};
    const u8* at[2] = {w.from + rows[0] * w.row_bytes, w.from + rows[1] * w.row_bytes};
    u32 first_col = unit * 64;

    if (w.format == F16 || w.format == BF16) {
        u8* chunk = w.to + chunk_index(tile, unit, units) * 2048;
        for (int s = 0; s < 4; s++)
            for (int pair = 0; pair < 4; pair++)
                for (int second = 0; second < 2; second++) {
                    u32 col = first_col + s * 16 + pair / 2 * 8 + 2 * t + second;
                    bool inside = valid[pair % 2] && col < w.cols;
                    u16 bits = 0;
                    if (inside && w.from_f32) {
                        float value = ((const float*)at[pair % 2])[col];
                        bits = w.format == F16 ? float_to_half(value) : float_to_bf16(value);
                    } else if (inside) {
                        bits = two_bytes(at[pair % 2] + 2 * col);
                    }
                    ((u16*)(chunk + s * 512 + lane * 16))[2 * pair + second] = bits;
                }
        return;
    }
    if (w.format == Q8_0) {
        u8* chunk = w.to + chunk_index(tile, unit / 2, units / 2) * 2176 + unit % 2 * 1088;
        for (int s = 0; s < 4; s++)
            for (int pair = 0; pair < 4; pair++)
                for (int second = 0; second < 2; second++) {
                    u32 col = first_col + s * 16 + pair / 2 * 8 + 2 * t + second;
                    bool inside = valid[pair % 2] && col < w.cols;
                    u8 q = inside ? raw_bits(Q8_0, at[pair % 2], col) : 128;
                    chunk[s / 2 * 512 + lane * 16 + s % 2 * 8 + pair % 2 * 4 + pair / 2 * 2 + second] = q;
                }
        if (t < 2)
            for (int half = 0; half < 2; half++) {
                u32 col = first_col + t * 32;
                bool inside = valid[half] && col < w.cols;
                ((u16*)(chunk + 1024 + g * 8))[half * 2 + t] = inside ? two_bytes(at[half] + col / 32 * 34) : 0;
            }
        return;
    }

    bool is_q4_0 = w.format == Q4_0;
    u64 chunk_bytes = is_q4_0 ? 2304 : w.format == Q4_K ? 2368 : w.format == Q5_K ? 2880 : 3360;
    u32 u = unit % 4;
    u8* chunk = w.to + chunk_index(tile, unit / 4, units / 4) * chunk_bytes;
    // The scales of Q4_0 stand with each unit, those of the others behind the last.
    u8* numbers = chunk + u * (is_q4_0 ? 576 : 512);
    u32 fifth = 0;
    u32 high[2] = {0, 0};
    for (int s = 0; s < 4; s++) {
        u32 word = 0;
        for (int pair = 0; pair < 4; pair++)
            for (int second = 0; second < 2; second++) {
                u32 col = first_col + s * 16 + pair / 2 * 8 + 2 * t + second;
                if (!valid[pair % 2] || col >= w.cols) continue;
                u32 q = raw_bits(w.format, at[pair % 2], col);
                word |= (q & 15) << (4 * pair + 16 * second);
                fifth |= (q >> 4 & 1) << (4 * s + pair + 16 * second);
                high[s / 2] |= (q >> 4 & 3) << (2 * (4 * (s % 2) + pair) + 16 * second);
            }
        ((u32*)(numbers + lane * 16))[s] = word;
    }
    if (is_q4_0) {
        if (t < 2)
            for (int half = 0; half < 2; half++) {
                u32 col = first_col + t * 32;
                bool inside = valid[half] && col < w.cols;
                ((u16*)(numbers + 512 + g * 8))[half * 2 + t] = inside ? two_bytes(at[half] + col / 32 * 18) : 0;
            }
        return;
    }
    u64 block_bytes = w.format == Q4_K ? 144 : w.format == Q5_K ? 176 : 210;
    const u8* blocks[2] = {at[0] + first_col / 256 * block_bytes, at[1] + first_col / 256 * block_bytes};
    if (w.format == Q6_K) {
        u32* to = (u32*)(chunk + 2048 + u * 256 + lane * 8);
        to[0] = high[0];
        to[1] = high[1];
        // The four lanes of a row write its four steps' scales.
        for (int half = 0; half < 2; half++)
            chunk[3072 + u * 64 + g * 8 + half * 4 + t] = valid[half] ? blocks[half][192 + u * 4 + t] : 0;
        if (u == 0 && t < 2)
            ((u16*)(chunk + 3328 + g * 4))[t] = valid[t] ? two_bytes(blocks[t] + 208) : 0;
        return;
    }
    u32 scales_at = 2048;
    if (w.format == Q5_K) {
        *(u32*)(chunk + 2048 + u * 128 + lane * 4) = fifth;
        scales_at = 2560;
    }
    // Lane t writes scale or minimum (t % 2) of sub-block t / 2 of the unit.
    for (int half = 0; half < 2; half++)
        chunk[scales_at + u * 64 + g * 8 + half * 4 + t] =
            valid[half] ? six_bits(blocks[half], 2 * u + t / 2, t % 2) : 0;
    if (u == 0)
        ((u16*)(chunk + scales_at + 256 + g * 8))[t] = valid[t / 2] ? two_bytes(blocks[t / 2] + t % 2 * 2) : 0;
}
