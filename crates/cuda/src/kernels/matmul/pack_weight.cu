// Packs a weight from the bytes of its file, [rows][cols], into the tiles of weight_formats.cu, once when a model is
// loaded. A thread writes what one lane of one unit reads. Bytes moved: the weight twice. Bound: the copy from the host
// that comes before it.

struct PackWeight {
    const u8* from;   // rows as they lie in the file, from `first_row` on
    u8* to;           // the whole packed matrix
    u64 row_bytes;
    u32 cols;
    u32 first_row;    // a multiple of 16
    u32 num_rows;     // rows in `from`
    u32 format;
    u32 from_f32;     // `from` holds f32, to be rounded to f16 or bf16: for formats without tiles
};

// A half times a power of two.
DEVICE u16 times_power(u16 half, int exponent) { return float_to_half(ldexpf(half_to_float(half), exponent)); }

KERNEL void pack_weight(PackWeight w) {
    begin();
    // Whole groups: the last is padded with zeros.
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
                ((u16*)(chunk + 1024 + g * 8))[half * 2 +
                    t] = inside ? times_power(two_bytes(at[half] + col / 32 * 34), 18) : 0;
            }
        return;
    }

    if (w.format == MXFP4) {
        u8* chunk = w.to + chunk_index(tile, unit / 4, units / 4) * (4 * 576) + unit % 4 * 576;
        for (int s = 0; s < 4; s++) {
            u32 word = 0;
            for (int pair = 0; pair < 4; pair++)
                for (int second = 0; second < 2; second++) {
                    u32 col = first_col + s * 16 + pair / 2 * 8 + 2 * t + second;
                    if (!valid[pair % 2] || col >= w.cols) continue;
                    u32 q = raw_bits(MXFP4, at[pair % 2], col);
                    word |= ((q & 7) << 3 * pair | q >> 3 << (12 + pair)) << 16 * second;
                }
            ((u32*)(chunk + lane * 16))[s] = word;
        }
        if (t < 2)
            for (int half = 0; half < 2; half++) {
                u32 col = first_col + t * 32;
                // Scales outside of this range are those of blocks of zeros.
                u32 e = valid[half] && col < w.cols ? min(max((u32)at[half][col / 32 * 17], 104u), 128u) : 104;
                ((u16*)(chunk + 512 + g * 8))[half * 2 + t] = (e - 98) << 10;
            }
        return;
    }

    bool is_q4_0 = w.format == Q4_0, is_small = is_q4_0 || w.format == Q4_K;
    u32 unit_bytes = is_q4_0 ? 576 : w.format == Q4_K ? 640 : w.format == Q5_K ? 768 : 896;
    u8* chunk = w.to + chunk_index(tile, unit / 4, units / 4) * (4 * unit_bytes) + unit % 4 * unit_bytes;
    u32 fifth = 0;
    u32 high[2] = {0, 0};
    // Position of the bits above four of a pair: see `with_high_bits`.
    const u32 high_at[4] = {4, 8, 12, 0};
    for (int s = 0; s < 4; s++) {
        u32 word = 0;
        for (int pair = 0; pair < 4; pair++)
            for (int second = 0; second < 2; second++) {
                u32 col = first_col + s * 16 + pair / 2 * 8 + 2 * t + second;
                if (!valid[pair % 2] || col >= w.cols) continue;
                u32 q = raw_bits(w.format, at[pair % 2], col);
                u32 bit = 4 * pair + 16 * second + (is_small ? 2 : 0);
                word |= __funnelshift_l(q & 15, q & 15, bit);
                fifth |= (q >> 4 & 1) << (high_at[pair] + s + 16 * second);
                high[s / 2] |= (q >> 4 & 3) << (high_at[pair] + s % 2 * 2 + 16 * second);
            }
        ((u32*)(chunk + lane * 16))[s] = word;
    }
    // The high bits lie between the words and the scales, which come for each g: those of row g, then those of row g +
    // 8.
    u8* scales = chunk + unit_bytes - (is_q4_0 ? 64 : 128);
    if (w.format == Q5_K) *(u32*)(chunk + 512 + lane * 4) = fifth;
    if (w.format == Q6_K) *(uint2*)(chunk + 512 + lane * 8) = make_uint2(high[0], high[1]);
    for (int half = 0; half < 2; half++) {
        u32 col = first_col + (w.format == Q6_K ? t * 16 : is_q4_0 ? t * 32 : t / 2 * 32);
        bool inside = valid[half] && col < w.cols;
        if (is_q4_0) {
            if (t < 2) ((u16*)(scales + g * 8))[half * 2 +
                t] = inside ? times_power(two_bytes(at[half] + col / 32 * 18), half ? 12 : 16) : 0;
        } else {
            // Lane t has the scale of step t, or scale or minimum (t % 2) of columns t / 2 * 32 on.
            float scale = inside ? k_scale(w.format, at[half], col, w.format == Q6_K ? 0 : t % 2) : 0.0f;
            u16 rounded = float_to_half(scale);
            if (w.format == Q4_K) rounded = t % 2 ? times_power(rounded, -6) ^ 0x8000 : times_power(rounded,
                half ? 12 : 16);
            ((u16*)(scales + g * 16))[half * 4 + t] = rounded;
        }
    }
}
